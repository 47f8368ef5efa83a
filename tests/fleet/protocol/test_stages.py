"""Tests of thinking, a stage with a pace of its own: where it ends, and when tokens are due."""

from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.columns import pack, unpack_list
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.worker.step import Finished, Ran, TurnDone
from shared.measure import Measure
from shared.rules.tiers import Tier, TierSet
from shared.schemas import Body, PlanAck, Record, Sampling
from shared.text import chat_prompt as chat
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, ReplicaId, ServiceClass, Slo
from tests import made
from tests.shared.core.placed_record import placed
from tests.simulated.folding import fold

SLO = Slo(ttft_s=1.0, thinking_tbt_s=0.05, tbt_s=0.1)
END = 7  # the token that ends thinking

# ---------------------------------------------------------------- what is due


slos = st.builds(
    lambda ttft_s, thinking_tbt_s, tbt_s: Slo(
        ttft_s=ttft_s, thinking_tbt_s=thinking_tbt_s, tbt_s=tbt_s
    ),
    *[
        st.sampled_from([None, 0.25, 0.5]),
        st.sampled_from([None, 0.125, 0.5]),
        st.sampled_from([None, 0.25]),
    ],
)


@given(
    slos,
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=12),
    st.integers(0, 30),
)
def test_it_matters_neither_how_tokens_are_grouped_nor_when_within_its_group_the_end_is_reported(
    slo: Slo, groups: list[tuple[int, int]], thinking: int
) -> None:
    at_s = np.cumsum([gap / 64 for _, gap in groups])
    beforehand = in_time = Measure.begin(slo, 0.0)
    late, due_s, made = 0, slo.first_due_unix_s(0.0), 0
    for (n, _), now_s in zip(groups, at_s.tolist(), strict=True):
        beforehand = beforehand.emit(n, now_s, slo, thinking)
        in_time = in_time.emit(n, now_s, slo, thinking if in_time.tokens + n >= thinking else None)
        for _ in range(n):
            due_s, made = now_s if made == 0 and due_s == float("inf") else due_s, made + 1
            late += now_s > due_s
            due_s += slo.pace_s(slo.thinks and made < thinking)
    assert (
        (in_time.next_due_unix_s, in_time.late_tokens)
        == (beforehand.next_due_unix_s, beforehand.late_tokens)
        == (due_s, late)
    )
    assert in_time.thought_unix_s == beforehand.thought_unix_s
    assert in_time.thinking_tokens == (thinking if made >= thinking else None)


# ---------------------------------------------------------------- where it ends


class One:
    """A worker with one request, and all its acks."""

    def __init__(
        self,
        record: Record,
        sampling: Sampling,
        prompt: Sequence[int] = (1,) * 20,
        *,
        end: int | None = END,
    ) -> None:
        self.core = made.worker_core("r", end_of_thinking=end)
        made.hold(self.core, 2, record, Body(prompt=pack(prompt), sampling=sampling))
        self.acks: list[PlanAck] = []
        self.seq, self.now_s = 1, 100.0

    def make(self, *tokens: int) -> PlanAck:
        """Run one iteration, in which the request makes these tokens."""
        self.now_s += 1.0
        plan = made.plan([2], [1000], replica=ReplicaId("r"), seq=self.seq, predicted_s=1.0)
        assert self.core.plan(plan) is None
        self.seq += 1
        step = self.core.begin(now_unix_s=self.now_s)
        assert step is not None
        done = [TurnDone(step.work[0].tokens + len(tokens) - 1, tokens, "", None)]
        return self.keep(
            self.core.finish(
                Ran(done, 1.0), started_unix_s=self.now_s - 1, ended_unix_s=self.now_s, idle_s=0.0
            )
        ).ack

    def keep(self, finished: Finished) -> Finished:
        self.core.check()
        self.acks.append(finished.ack)
        return finished

    def changes(self) -> list[tuple[int, int]]:
        return [
            (n, tokens)
            for n, ack in enumerate(self.acks)
            for slot, tokens in zip(
                unpack_list(ack.answering), unpack_list(ack.thinking_tokens), strict=True
            )
            if slot == 2
        ]


def record_of(slo: Slo, prompt_tokens: int = 20) -> Record:
    record = made.record(slo=slo, arrived_unix_s=100.0, prompt_tokens=prompt_tokens, max_tokens=200)
    return placed(record, ReplicaId("r"), "i")


def test_the_token_that_ends_it_is_reported_once_with_the_ack_that_has_it() -> None:
    one = One(record_of(SLO), Sampling(max_tokens=200))
    for tokens in ((1,), (2, 3), (4, END, 5), (6, END)):
        one.make(*tokens)
    assert one.changes() == [(2, 5)]


@pytest.mark.parametrize(
    ("sampling", "prompt", "end", "expected"),
    [
        # as said beforehand, whatever is generated
        (Sampling(thinking_tokens=3), (1,), END, [(1, 3)]),
        (Sampling(thinking_tokens=0), (1,), END, [(0, 0)]),
        (Sampling(), (1,), None, [(0, 0)]),  # a model that has no such token
        # a template that closes the thinking it does not want
        (Sampling(), (1, 9, END, 2), END, [(0, 0)]),
        (Sampling(), (1, END, 9, 9, 9, 9, 9), END, []),  # one of an earlier turn, quoted
    ],
)
def test_the_end_is_known_from_the_sampling_the_model_or_the_template(
    sampling: Sampling, prompt: tuple[int, ...], end: int | None, expected: list[tuple[int, int]]
) -> None:
    one = One(record_of(SLO, len(prompt)), sampling, prompt, end=end)
    for tokens in ((1,), (2, 3), (4,)):
        one.make(*tokens)
    assert one.changes() == expected


def test_no_worker_follows_the_stages_of_a_request_without_a_pace_for_thinking() -> None:
    one = One(record_of(Slo(ttft_s=1.0, tbt_s=0.1)), Sampling(thinking_tokens=2))
    for tokens in ((1,), (END,), (2,)):
        one.make(*tokens)
    assert one.changes() == []


@pytest.mark.parametrize("made", [1, 4, 6])
def test_a_request_that_moves_keeps_its_stage_whether_its_worker_or_the_log_tells_of_it(
    made: int,
) -> None:
    record = record_of(SLO)
    here = One(record, Sampling(thinking_tokens=4))
    for token in range(made):
        here.make(token)
    here.core.drain()
    finished = here.core.between()
    assert finished is not None
    [over] = here.keep(finished).overs
    [story] = fold(here.acks, ReplicaId("r1")).values()
    assert story.resume(record).measure == over.resume.measure
    assert over.resume.measure.thinking_tokens == (4 if made >= 4 else None)

    waiting = life.settled(record, over, "a", 200.0)
    assert waiting is not None
    moved = placed(waiting, ReplicaId("r"), "i")
    assert as_offer(moved, ServiceClass.STANDARD).thinking == (made < 4)
    there = One(moved, Sampling(thinking_tokens=4))
    [entry] = there.core.entries()
    assert entry.offer.answering == (made >= 4)
    for token in range(made, 8):
        there.make(token)
    assert there.changes() == ([] if made >= 4 else [(3 - made, 4)])
    assert there.core.entries()[0].offer.next_due_unix_s == pytest.approx(
        101.0 + 3 * 0.05 + 5 * 0.1
    )


def test_the_end_of_thinking_is_looked_for_among_the_tokens_that_were_added_to_the_vocabulary() -> (
    None
):
    def added(*names: str) -> Tokenizer:
        inner = tokenizers.Tokenizer.from_str(Tokenizer.builtin().inner.to_str())
        inner.add_tokens([tokenizers.AddedToken(name, special=False) for name in names])
        return Tokenizer(inner, eos_token_ids=frozenset(), render=chat.marked)

    thinker = added("<think>", "</think>")
    assert thinker.end_of_thinking == thinker.inner.token_to_id("</think>") is not None
    assert added("<tool>").end_of_thinking is None
    assert Tokenizer.builtin().end_of_thinking is None


TIERS = TierSet(
    name="thinkers",
    default="quick",
    tiers={
        "quick": Tier(slo=Slo(ttft_s=2.0, thinking_tbt_s=0.02, tbt_s=0.1)),
        "slow": Tier(slo=Slo(ttft_s=2.0, thinking_tbt_s=0.1, tbt_s=0.03)),
        "plain": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.05)),
    },
)


def run(
    requests: list[PlannedRequest], policy: str = "fcfs", *, leaps: bool = True
) -> SimulationResult:
    return simulate(
        Traffic(requests, TIERS),
        Deployment(policy, "a100-llama3-8b"),
        RunOptions(keep_times=True, check_every=3, leaps=leaps),
    )


def test_a_verdict_tells_how_long_it_thought_and_at_which_pace() -> None:
    result = run([PlannedRequest(0, 0.0, 500, 40, "quick", 1.0, "default", "", thinking_tokens=15)])
    [verdict], [times] = result.verdicts, result.token_unix_s or [[]]
    assert verdict is not None
    assert (verdict.finish_reason, verdict.output_tokens, verdict.thinking_tokens) == (
        FinishReason.STOP,
        40,
        15,
    )
    assert verdict.thinking_tpot_s == pytest.approx((times[14] - times[0]) / 14)


# ---------------------------------------------------------------- in a simulation
