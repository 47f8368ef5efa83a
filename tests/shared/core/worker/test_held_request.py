"""Tests of a request that a worker holds: how many tokens of its prompt count as cached."""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.columns import pack
from shared.core.worker.step import Ran, TurnDone
from shared.schemas import Body, LogEntry, Resume, Sampling
from shared.vocabulary import ReplicaId
from tests import made
from tests.shared.core.placed_record import placed
from tests.simulated.folding import fold

RECORD = made.record(attempt=1, expires_unix_s=1000000.0, prompt_tokens=4, max_tokens=40)


class Attempt:
    """An attempt at a request with a prompt of 100 tokens, of which the engine finds some."""

    def __init__(self, resume: Resume | None = None) -> None:
        self.worker = made.worker_core(context_tokens=4096, max_slots=4)
        self.log: list[LogEntry] = []
        record = replace(RECORD, prompt_tokens=100, resume=resume or Resume())
        self.record = record = placed(record, self.worker.replica, "i")
        body = Body(prompt=pack([1] * 100), sampling=Sampling(max_tokens=40))
        made.hold(self.worker, 0, record, body)

    def run(self, computed: int, cached: int, tokens: int, *, preempt: bool = False) -> None:
        seq = self.worker.next_seq
        plan = made.plan(
            [0],
            [max(1, computed - cached)],
            seq=seq,
            predicted_s=0.05,
            preempted=pack([0]) if preempt else b"",
        )
        assert self.worker.plan(plan) is None
        assert self.worker.begin(now_unix_s=seq) is not None
        did = TurnDone(computed, (7,) * tokens, "x" * tokens, None, cached=cached)
        finished = self.worker.finish(
            Ran([did], 0.5), started_unix_s=seq, ended_unix_s=seq + 0.5, idle_s=0.0
        )
        self.log.append(finished.ack)
        self.worker.check()

    def leave(self) -> Resume:
        """The output as the worker gives it back. The log says the same of it, from its beginning
        as from a snapshot on.
        """
        told = [self._lost(self.log), self._lost(self.worker.snapshots())]
        self.worker.drain()
        ended = self.worker.between()
        assert ended is not None
        resume = ended.overs[0].resume
        assert [one.cached_tokens for one in told] == [resume.cached_tokens] * 2
        return resume

    def _lost(self, log: Sequence[LogEntry]) -> Resume:
        """The output as admission takes it from the log of a worker that is gone."""
        record = self.record
        return fold(log, ReplicaId("r1"))[record.key, record.attempt, "i"].resume(record)


def test_usage_counts_the_cached_tokens_of_a_prompt_however_it_is_chunked() -> None:
    for chunks in (
        [(100, 80, 1)],
        [(90, 80, 0), (10, 0, 1)],
        [(0, 0, 0), (81, 80, 0), (9, 0, 0), (10, 0, 1)],  # it finds no room at first
    ):
        attempt = Attempt()
        for computed, cached, tokens in chunks:
            attempt.run(computed, cached, tokens)
        attempt.run(1, 0, 1)
        assert attempt.leave().cached_tokens == 80


def test_what_a_request_finds_again_after_a_preemption_or_a_move_is_no_cached_token() -> None:
    preempted = Attempt()
    preempted.run(90, 32, 0)
    preempted.run(100, 80, 1, preempt=True)
    preempted.run(101, 96, 1, preempt=True)
    resume = preempted.leave()
    assert resume.cached_tokens == 32
    for found in (0, 32):  # moved with a part of its prompt
        first = Attempt()
        first.run(90, found, 0)
        moved = Attempt(first.leave())
        moved.run(100, 80, 1)
        assert moved.leave().cached_tokens == found
    moved = Attempt(resume)
    moved.run(102, 96, 1)
    assert moved.leave().cached_tokens == 32
