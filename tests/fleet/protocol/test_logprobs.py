"""Tests of log-probabilities between services: they stay with their tokens, logged or moved."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import Done, EngineState, Likely, Outcome
from services.worker.output_processor import OutputProcessor
from services.worker.step_runner import run_step
from shared.columns import pack, unpack_list
from shared.core.record import record as life
from shared.core.worker.step import Load, Step, Work
from shared.schemas import (
    AttemptOver,
    Body,
    Delta,
    LogEntry,
    Record,
    Resume,
    Sampling,
    Selection,
    StreamEvent,
    TokenLogprob,
)
from shared.store import acklog
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, RequestKey, Slo, Slot
from tests import made
from tests.shared.core.placed_record import placed
from tests.simulated.folding import fold

PROMPT, OUTPUT = [1, 2, 3], 12
NOW = 1000.0


def token_of(slot: int, n: int) -> int:
    """Output token n of a request: a letter."""
    return 97 + (7 * slot + n) % 26


def likely_of(slot: int, n: int, top: int) -> Likely:
    return Likely(-0.1 * n - slot, [(97 + i, -0.5 * i) for i in range(top)])


class Scripted:
    """An engine whose tokens are known beforehand; the test says how many each entry makes at
    once.
    """

    facts = made.engine_facts(engine="scripted", profile="p")

    def __init__(self) -> None:
        self.loads: dict[Slot, Load] = {}
        self.made: dict[Slot, int] = {}
        self.bursts: dict[Slot, int] = {}

    def load(self, load: Load) -> None:
        self.loads[load.slot], self.made[load.slot] = load, load.generated

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        return Outcome([self._do(one) for one in work], 0.001)

    def _do(self, work: Work) -> Done:
        if not work.emits:
            return Done(work.tokens, ())
        n, slot, top = self.made[work.slot], work.slot, self.loads[work.slot].sampling.logprobs
        positions = range(n, n + self.bursts.get(slot, 1))
        self.made[slot] = positions.stop
        known = () if top is None else [likely_of(slot, i, top) for i in positions]
        return Done(work.tokens, [token_of(slot, i) for i in positions], logprobs=known)

    def preempt(self, slot: Slot) -> None: ...

    def release(self, slot: Slot) -> None:
        del self.loads[slot]

    def snapshot(self) -> EngineState:
        return EngineState(0, [])

    def close(self) -> None: ...


class Replica:
    """A worker's core, and the log that it keeps."""

    def __init__(self, name: str) -> None:
        self.core = made.worker_core(name, f"{name}-1")
        self.engine, self.processor = Scripted(), OutputProcessor(Tokenizer.builtin())
        self.log: list[LogEntry] = []

    def run(
        self, slots: Sequence[int], *, released: Sequence[int] = (), preempted: Sequence[int] = ()
    ) -> list[tuple[str, StreamEvent]]:
        """Run one plan; the events for clients, as decoded from the wire."""
        plan = made.plan(
            slots,
            [64] * len(slots),
            replica=self.core.replica,
            incarnation=self.core.incarnation,
            seq=self.core.next_seq,
            predicted_s=0.0,
            released=pack(released),
            released_why=["offloaded"] * len(released),
            preempted=pack(preempted),
        )
        assert self.core.plan(plan) is None
        step = self.core.begin(now_unix_s=NOW)
        assert step is not None
        ran = run_step(self.engine, self.processor, step)
        finished = self.core.finish(ran, started_unix_s=NOW, ended_unix_s=NOW, idle_s=0.0)
        self.core.check()
        self.log.append(acklog.decode_entry(acklog.encode_entry(finished.ack)))
        return [
            (out.subject, msgspec.json.decode(msgspec.json.encode(out.event), type=StreamEvent))
            for out in finished.outgoing
        ]

    def trim(self) -> None:
        """Put a snapshot in place of all log entries."""
        self.log[:] = [
            acklog.decode_entry(acklog.encode_entry(page)) for page in self.core.snapshots()
        ]


@dataclass
class Client:
    """The client of one request."""

    slot: int
    top: int | None
    record: Record
    replica: Replica

    @staticmethod
    def begin(slot: int, top: int | None, replica: Replica) -> "Client":
        key = RequestKey(f"t.r{slot}")
        record = made.record(
            key,
            slo=Slo(ttlt_s=100.0),
            arrived_unix_s=NOW,
            prompt_tokens=len(PROMPT),
            max_tokens=OUTPUT,
            stream_subject=key,
        )
        client = Client(slot, top, record, replica)
        client.place(replica)
        return client

    def truth(self, begin: int, end: int) -> list[TokenLogprob]:
        """The event that the client should receive for the tokens from `begin` to `end`."""
        if self.top is None:
            return []
        engine = Scripted()
        engine.load(Load(Slot(self.slot), PROMPT, begin, Sampling(logprobs=self.top), 0))
        engine.bursts = {Slot(self.slot): end - begin}
        work = Work(self.slot, 1, True, OUTPUT, FinishReason.LENGTH, frozenset())
        processor = OutputProcessor(Tokenizer.builtin())
        processor.open(Slot(self.slot), Sampling())
        done = run_step(engine, processor, Step(None, [], [], [], [work], None, [])).done
        return list(done[0].logprobs)

    def place(self, replica: Replica) -> None:
        core = replica.core
        self.replica = replica
        self.record = placed(self.record, core.replica, core.incarnation)
        body = Body(prompt=pack(PROMPT), sampling=Sampling(max_tokens=OUTPUT, logprobs=self.top))
        made.hold(core, self.slot, self.record, body, now_unix_s=NOW)

    def settle(self, over: AttemptOver) -> None:
        after = life.settled(self.record, over, "a", NOW)
        assert after is not None
        self.record = after

    def logged(self) -> Resume:
        """The tokens that the request has made by record and log, as admission reads them."""
        core = self.replica.core
        story = fold(self.replica.log, self.replica.core.replica).get(
            (self.record.key, self.record.attempt, core.incarnation)
        )
        return self.record.resume if story is None else story.resume(self.record)

    def check_logged(self) -> Resume:
        resume = self.logged()
        tokens = unpack_list(resume.tokens)
        assert tokens == [token_of(self.slot, n) for n in range(len(tokens))]
        assert resume.logprobs == self.truth(0, len(tokens))
        return resume

    def hear(self, event: StreamEvent) -> None:
        if isinstance(event, Delta):
            assert event.logprobs == self.truth(event.offset, event.offset + len(event.tokens))


@given(st.data())
def test_log_probabilities_stay_beside_their_tokens_whatever_happens_to_these(
    data: st.DataObject,
) -> None:
    """Requests with log-probabilities, with and without alternatives, and a request without share
    every batch.
    """
    replicas = [Replica("r1"), Replica("r2")]
    tops = data.draw(st.permutations([0, 2, None]))
    clients = [
        Client.begin(slot, top, replicas[data.draw(st.integers(0, 1))])
        for slot, top in enumerate(tops)
    ]
    named = {client.record.stream_subject: client for client in clients}

    def deliver(events: Sequence[tuple[str, StreamEvent]]) -> None:
        for subject, event in events:
            named[subject].hear(event)

    for _ in range(data.draw(st.integers(5, 30))):
        client = data.draw(st.sampled_from(clients))
        replica, slot = client.replica, client.slot
        here = [c for c in clients if c.replica is replica and c.record.verdict is None]
        match data.draw(st.sampled_from(("run", "run", "run", "preempt", "move", "trim"))):
            case "run" | "preempt" as step:
                replica.engine.bursts = {Slot(c.slot): data.draw(st.integers(1, 4)) for c in here}
                deliver(
                    replica.run(
                        [c.slot for c in here],
                        preempted=[slot] if step == "preempt" and client in here else (),
                    )
                )
                settle(replica, here)
            case "move" if client in here:
                deliver(replica.run([], released=[slot]))
                resume = client.check_logged()
                (over,) = [over for over in replica.core.unsettled if over.key == client.record.key]
                assert over.resume == resume
                replica.core.settled(over.key, over.attempt)
                client.settle(over)
                client.place(replicas[1 - replicas.index(replica)])
            case "trim":
                replica.trim()

    for replica in replicas:
        while here := [c for c in clients if c.replica is replica and c.record.verdict is None]:
            deliver(replica.run([c.slot for c in here]))
            settle(replica, here)


def settle(replica: Replica, clients: Sequence[Client]) -> None:
    """Write the verdicts of the requests that have ended."""
    for over in replica.core.unsettled:
        (client,) = [c for c in clients if c.record.key == over.key]
        assert client.check_logged() == over.resume
        assert len(unpack_list(over.resume.tokens)) == OUTPUT
        client.settle(over)
        replica.core.settled(over.key, over.attempt)
