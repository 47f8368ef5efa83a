"""Tests of a worker's metrics: a request's time is split into queue, prefill and decode."""

import pytest

from services.worker.config import WorkerConfig
from services.worker.engines.make import sim_facts
from services.worker.metrics import WorkerMetrics
from shared.columns import pack
from shared.core.worker.step import Finished, Ran, TurnDone
from shared.schemas import Body, Sampling
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, ReplicaId
from tests import made

R1 = ReplicaId("r1")
ARRIVED = 1000.0


class Bench:
    """A worker's core with its metrics; iterations take what the test says."""

    def __init__(self) -> None:
        self.registry = Registry()
        facts = sim_facts(WorkerConfig(), Tokenizer.builtin())
        self.metrics = WorkerMetrics(self.registry, R1, facts, None)
        self.core = made.worker_core()
        self.cached = 0  # positions that each prefill finds in a prefix cache

    def hold(self, slot: int, prompt_tokens: int, name: str = "a") -> None:
        record = made.record(
            f"t.{name}{slot}",
            owner="o",
            attempt=1,
            arrived_unix_s=ARRIVED,
            prompt_tokens=prompt_tokens,
            max_tokens=4,
            replica=R1,
            incarnation="i",
        )
        body = Body(prompt=pack([1] * prompt_tokens), sampling=Sampling(max_tokens=4))
        made.hold(self.core, slot, record, body, now_unix_s=ARRIVED)
        self.metrics.held(slot, record)

    def run(
        self, caps: dict[int, int], began_s: float, ended_s: float, *, preempt: bytes = b""
    ) -> Finished:
        plan = made.plan(
            list(caps),
            list(caps.values()),
            replica=R1,
            seq=self.core.next_seq,
            predicted_s=0.5,
            preempted=preempt,
        )
        assert self.core.plan(plan) is None
        step = self.core.begin(now_unix_s=began_s)
        assert step is not None
        done = []
        for work in step.work:
            tokens = (7,) if work.emits else ()
            end = FinishReason.LENGTH if tokens and work.limit == 1 else None
            cached = min(self.cached, work.tokens - 1)
            done.append(TurnDone(work.tokens, tokens, "a" if tokens else "", end, cached=cached))
        ran = Ran(done, ended_s - began_s)
        finished = self.core.finish(
            ran, started_unix_s=ARRIVED + began_s, ended_unix_s=ARRIVED + ended_s, idle_s=0.0
        )
        self.metrics.ran(step, ran, 0.0, ARRIVED + began_s, ARRIVED + ended_s)
        self.metrics.over(finished.overs)
        return finished

    def seen(self, name: str) -> tuple[float, float]:
        """The sum and the count of a histogram."""
        rows = self._rows(name)
        return rows["_sum"], rows["_count"]

    def counted(self, name: str) -> float:
        (counted,) = self._rows(name).values()
        return counted

    def _rows(self, name: str) -> dict[str, float]:
        (family,) = (one for one in self.registry.families() if one.name == name)
        ((labels, child),) = family.children.items()
        assert labels[-1] == R1
        return {sample.suffix: sample.number for sample in child.samples()}


def test_a_requests_time_is_split_into_queue_prefill_and_decode() -> None:
    bench = Bench()
    bench.hold(0, 20)
    bench.run({0: 10}, 2.0, 3.0)  # half of its prompt
    bench.run({0: 10}, 3.0, 4.0)  # its first token
    for n in range(3):
        bench.run({0: 1}, 4.0 + n, 5.0 + n)
    assert bench.seen(names.QUEUE_TIME) == (pytest.approx(2.0), 1)
    assert bench.seen(names.PREFILL_TIME) == (pytest.approx(2.0), 1)
    assert bench.seen(names.DECODE_TIME) == (pytest.approx(3.0), 1)
    assert bench.seen(names.INFERENCE_TIME) == (pytest.approx(5.0), 1)
    assert bench.seen(names.INTER_TOKEN_LATENCY) == (pytest.approx(3.0), 3)
    assert bench.seen(names.OLD_INTER_TOKEN_LATENCY) == (pytest.approx(3.0), 3)
    assert bench.seen(names.CHUNK_TOKENS) == (20, 2)
    assert bench.seen(names.ITERATION_TOKENS) == (23, 5)
    assert bench.seen(names.PREDICTED_ITERATION) == (pytest.approx(2.5), 5)
