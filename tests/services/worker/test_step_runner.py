"""Tests of the step runner, which runs iterations on an engine: a failure concerns one request."""

from collections.abc import Sequence

from services.worker.engine import Done, EngineState, Outcome, RefusedError
from services.worker.output_processor import OutputProcessor
from services.worker.step_runner import run_step
from shared.columns import pack, unpack_list
from shared.core.worker.step import Finished, Load, Ran, Work
from shared.schemas import BatchPlan, Body, Sampling, Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, Slo, Slot
from tests import made

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

    def restart(self) -> None:
        self.loads.clear()

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


def test_a_request_that_the_engine_gives_up_ends_and_is_freed() -> None:
    worker = Worker(Picky.HOPELESS, 1)
    finished = worker.run((0, PROMPT), (1, PROMPT))
    assert [(over.key, over.why, over.message) for over in finished.overs] == [
        ("t.0", "invalid", "its grammar cannot be compiled")
    ]
    worker.rest()
    assert sorted(worker.engine.loads) == [1]
