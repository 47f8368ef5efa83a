"""A turn on the engine thread: a refusal, a failure or a cache hit concerns one request alone."""

from collections.abc import Sequence

from services.worker.engine import Done, EngineState, Outcome, RefusedError
from services.worker.output_processor import OutputProcessor
from services.worker.step_runner import run_step
from shared.columns import pack, unpack_list
from shared.core.replica.events import Acked, NeedResync, SendPlan, Synced
from shared.core.replica.replica import ReplicaCore
from shared.core.worker.step import Finished, Load, Ran, Work
from shared.policy import registry
from shared.schemas import (
    BatchPlan,
    Body,
    Sampling,
    Selection,
)
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import (
    FinishReason,
    ReplicaId,
    RequestKey,
    Slo,
    Slot,
)
from tests import made
from tests.shared.policy.views import Linear

NOW, PROMPT = 1000.0, 40


class Picky:
    """An engine that refuses requests whose prompt begins with REFUSED, and gives up requests that
    begin with HOPELESS once they run. It finds the beginning of CACHED prompts in its cache, and of
    FORMATTED ones, whose first token cannot hold the format; those that begin with SPECULATING fail
    so with the drafts behind their first token.
    """

    REFUSED, HOPELESS, CACHED, FORMATTED, SPECULATING = 7, 8, 9, 10, 11
    facts = made.engine_facts(engine="picky", profile="p")

    def __init__(self) -> None:
        self.loads: dict[Slot, Load] = {}
        self.preempted: list[Slot] = []
        self.ran: list[list[Slot]] = []
        self.shared = 0, 0

    def load(self, load: Load) -> None:
        if load.tokens[0] == self.REFUSED:
            raise RefusedError("no such grammar")
        self.loads[load.slot] = load

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        assert selection is None or len(unpack_list(selection.depth)) == len(work)
        self.ran.append([one.slot for one in work])
        return Outcome([self._do(one) for one in work], 0.004, 0.001)

    def _do(self, work: Work) -> Done:
        kind = self.loads[work.slot].tokens[0]
        if kind == self.FORMATTED:
            return Done(PROMPT, (97,), cached=PROMPT - work.tokens, failed="the format is too deep")
        if kind == self.SPECULATING and work.tokens == 3:
            return Done(2, (97, 97), drafted=2, failed="the format is too deep")
        if kind == self.HOPELESS:
            return Done(0, (), failed="its grammar cannot be compiled")
        if kind == self.CACHED and not work.emits:
            return Done(PROMPT, (97,), cached=PROMPT - work.tokens)
        return Done(work.tokens, (97,) if work.emits else ())

    def preempt(self, slot: Slot) -> None:
        self.preempted.append(slot)

    def release(self, slot: Slot) -> None:
        del self.loads[slot]

    def snapshot(self) -> EngineState:
        return EngineState(0, list(self.loads), *self.shared)

    def close(self) -> None: ...


class Worker:
    def __init__(self, *kinds: int) -> None:
        self.core = made.worker_core(incarnation="i1", kv_blocks=64, context_tokens=256)
        self.engine, self.processor = Picky(), OutputProcessor(Tokenizer.builtin())
        self.ran = Ran([], 0.0)  # the newest turn
        for slot, kind in enumerate(kinds):
            key = RequestKey(f"t.{slot}")
            record = made.record(
                key,
                attempt=1,
                slo=Slo(ttlt_s=60.0),
                arrived_unix_s=NOW,
                expires_unix_s=NOW + 60,
                prompt_tokens=PROMPT,
                max_tokens=8,
                stream_subject=key,
                replica=ReplicaId("r1"),
                incarnation="i1",
            )
            body = Body(prompt=pack([kind, *[65] * (PROMPT - 1)]), sampling=Sampling(max_tokens=8))
            made.hold(self.core, slot, record, body)

    def run(
        self, *entries: tuple[int, int], preempted: Sequence[int] = (), drafts: bool = False
    ) -> Finished:
        column = pack([2] * len(entries))
        plan = made.plan(
            [slot for slot, _ in entries],
            [cap for _, cap in entries],
            incarnation="i1",
            seq=self.core.next_seq,
            predicted_s=0.0,
            preempted=pack(preempted),
            selection=Selection(method="chain", depth=column, width=column, budget_tokens=64)
            if drafts
            else None,
        )
        return self.obey(plan)

    def obey(self, plan: BatchPlan) -> Finished:
        assert self.core.plan(plan) is None
        step = self.core.begin(now_unix_s=NOW)
        assert step is not None
        ran = self.ran = run_step(self.engine, self.processor, step)
        finished = self.core.finish(ran, started_unix_s=NOW, ended_unix_s=NOW, idle_s=0.0)
        self.core.check()
        return finished

    def rest(self) -> None:
        """Take the turn that frees the rest."""
        step = self.core.begin(now_unix_s=NOW)
        if step is not None:
            run_step(self.engine, self.processor, step)


def test_a_request_that_the_engine_does_not_take_fails_alone_with_its_words() -> None:
    worker = Worker(1, Picky.REFUSED, 2)
    finished = worker.run((0, PROMPT), (1, PROMPT), (2, PROMPT), drafts=True)
    assert worker.engine.ran == [[0, 2]]
    assert [over.key for over in finished.overs] == ["t.1"]
    assert (finished.overs[0].why, finished.overs[0].message) == (
        FinishReason.INVALID,
        "no such grammar",
    )
    assert unpack_list(finished.ack.emitted) == [1, 0, 1]
    assert unpack_list(finished.ack.computed) == [PROMPT, 0, PROMPT]
    worker.rest()  # the engine never had it: nothing of it is released
    assert sorted(worker.engine.loads) == [0, 2]


def test_a_plan_of_refused_requests_alone_runs_nothing() -> None:
    worker = Worker(Picky.REFUSED)
    finished = worker.run((0, PROMPT))
    assert worker.engine.ran == []
    assert [over.why for over in finished.overs] == [FinishReason.INVALID]
    assert worker.core.held == 0


def test_a_request_that_the_engine_gives_up_ends_and_is_freed() -> None:
    worker = Worker(Picky.HOPELESS, 1)
    finished = worker.run((0, PROMPT), (1, PROMPT))
    assert [(over.key, over.why, over.message) for over in finished.overs] == [
        ("t.0", "invalid", "its grammar cannot be compiled")
    ]
    worker.rest()
    assert sorted(worker.engine.loads) == [1]


def test_what_a_prefix_cache_had_is_in_the_ack_and_in_the_books() -> None:
    worker = Worker(Picky.CACHED, 1)
    finished = worker.run((0, 8), (1, 8))
    assert unpack_list(finished.ack.computed) == [PROMPT, 8]
    assert unpack_list(finished.ack.cached) == [PROMPT - 8, 0]
    assert unpack_list(finished.ack.emitted) == [1, 0]
    assert worker.core.free_blocks == 64 - 3 - 1
    assert (finished.ack.exec_s, finished.ack.outside_s) == (0.004, 0.001)


def test_a_request_that_fails_behind_a_cached_prefix_costs_its_replica_no_resync() -> None:
    """Its chunk of 8 computes all 40 tokens of its prompt, since 32 are in the cache."""
    worker = Worker(Picky.FORMATTED)
    planner = ReplicaCore(registry.make("fcfs", {"chunk_tokens": "8"}), Linear(), epoch=1)
    announce = made.announce(
        incarnation="i1",
        at_unix_s=NOW,
        engine="e",
        profile="p",
        kv_blocks=64,
        context_tokens=256,
        epoch=1,
    )
    core = worker.core
    synced = Synced(announce, 1, core.next_seq, core.ack_seq, core.entries())
    plan, *_ = (
        action.plan
        for action in planner.handle(synced, now_unix_s=NOW)
        if isinstance(action, SendPlan)
    )
    finished = worker.obey(plan)
    assert [over.message for over in finished.overs] == ["the format is too deep"]
    actions = planner.handle(Acked(finished.ack), now_unix_s=NOW)
    assert [action for action in actions if isinstance(action, NeedResync)] == []
    planner.check()


def test_what_was_drafted_for_a_request_that_fails_counts_as_drafted() -> None:
    worker = Worker(Picky.SPECULATING)
    worker.run((0, PROMPT))
    finished = worker.run((0, 3), drafts=True)
    assert [over.message for over in finished.overs] == ["the format is too deep"]
    assert [(did.computed, did.drafted) for did in worker.ran.done] == [(2, 2)]
    assert unpack_list(finished.ack.drafted) == [2]
    (told,) = worker.core.draft_yields
    assert (told.verifications, told.accepted) == (1, [1.0, 0.0])


def test_what_requests_share_is_in_the_ack_and_in_the_books() -> None:
    worker = Worker(1, 2)
    for entries in ([(0, PROMPT), (1, PROMPT)], []):
        worker.engine.shared = (3, 2) if entries else (2, 1)
        finished = worker.run(*entries)
        assert (
            finished.ack.shared_blocks,
            finished.ack.draft_shared_blocks,
        ) == worker.engine.shared
        assert (worker.core.shared_blocks, worker.core.draft_shared_blocks) == worker.engine.shared


def test_a_preempted_request_stays_with_the_engine_and_is_computed_again_from_the_start() -> None:
    worker = Worker(1)
    worker.run((0, PROMPT))
    worker.run((0, 1))
    finished = worker.run((0, 64), preempted=[0])
    assert worker.engine.preempted == [0]
    assert len(worker.engine.loads) == 1
    assert unpack_list(finished.ack.computed) == [PROMPT + 2]
    assert unpack_list(finished.ack.emitted) == [1]
