"""The four definitions of a met SLO: the delays that each tolerates, and those that it does not."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.definition import (
    DEADLINE,
    DEFINITIONS,
    MAX_TPOT_10,
    MEAN_TPOT,
    TTLT,
    Missed,
    missed,
    worst_tpot_s,
)
from shared.errors import ConfigError
from shared.schemas import Verdict
from shared.vocabulary import FinishReason, Measure, ServiceClass, Slo

CHAT = Slo(ttft_s=1.0, tbt_s=0.1)
SUMMARY = Slo(ttlt_s=5.0)


def verdict_of(
    token_s: Sequence[float], slo: Slo, reason: FinishReason = FinishReason.STOP, thinking: int = 0
) -> Verdict:
    """The verdict of a request that arrived at 0, from a live worker's measure."""
    measure = Measure.begin(slo, 0.0)
    for at_s in token_s:
        measure = measure.emit(1, at_s, slo, thinking)
    several, thinking = len(token_s) > 1, thinking if slo.thinks else 0
    return Verdict(
        finish_reason=reason,
        slo_met=reason is FinishReason.STOP and measure.met(slo, 0.0),
        relegated=False,
        service_class=ServiceClass.STANDARD,
        prompt_tokens=10,
        output_tokens=len(token_s),
        attempts=1,
        ttft_s=token_s[0] if token_s else None,
        worst_tbt_s=measure.worst_tbt_s if several else None,
        mean_tpot_s=(token_s[-1] - token_s[0]) / (len(token_s) - 1) if several else None,
        ttlt_s=token_s[-1] if token_s else None,
        ended_unix_s=token_s[-1] if token_s else 0.0,
        thinking_tokens=thinking,
        thinking_tpot_s=(token_s[thinking - 1] - token_s[0]) / (thinking - 1)
        if thinking > 1
        else None,
    )


def judged(token_s: Sequence[float], slo: Slo = CHAT, thinking: int = 0) -> dict[str, Missed]:
    """The outcome by each definition."""
    return {
        d: Missed(missed(d, [verdict_of(token_s, slo, thinking=thinking)], [slo], [token_s])[0])
        for d in DEFINITIONS
    }


def paced(first_s: float, *gaps_s: float) -> list[float]:
    return [first_s, *(first_s + np.cumsum(gaps_s)).tolist()]


N, F, B, L = Missed.NOTHING, Missed.TTFT, Missed.TBT, Missed.TTLT


@pytest.mark.parametrize(
    ("token_s", "slo", "expected"),  # by deadline, mean-tpot, max-tpot-10, ttlt
    [
        (paced(0.5, *[0.09] * 20), CHAT, (N, N, N, N)),
        # late at first, and ahead of its pace at the end
        (paced(1.2, *[0.05] * 20), CHAT, (F, F, F, N)),
        # one stall that no slack covers; 0.085 over its first ten tokens
        (paced(0.9, 0.4, *[0.05] * 19), CHAT, (B, N, N, N)),
        # ten slow tokens after ten quick ones that bank 0.6 s
        (paced(0.9, *[0.05] * 10, *[0.12] * 10), CHAT, (N, N, B, N)),
        # always too slow, from a head start of 0.9 s
        (paced(0.1, *[0.12] * 20), CHAT, (N, B, B, N)),
        (paced(0.9, *[0.12] * 20), CHAT, (B, B, B, L)),
        ([0.9], CHAT, (N, N, N, N)),  # one token has no pace
        ([1.1], CHAT, (F, F, F, L)),  # its first token is its last
        (paced(3.0, *[0.5] * 4), SUMMARY, (N, N, N, N)),
        (paced(3.0, *[0.5] * 5), SUMMARY, (L, L, L, L)),
        (paced(2.0, *[0.2] * 5), Slo(ttft_s=1.0), (F, F, F, F)),  # nothing else to be held to
        # its pace counts from its first token
        (paced(9.0, *[0.09] * 20), Slo(tbt_s=0.1), (N, N, N, N)),
        (paced(9.0, *[0.11] * 20), Slo(tbt_s=0.1), (B, B, B, L)),
        (paced(0.5, *[0.09] * 50), Slo(ttft_s=1.0, tbt_s=0.1, ttlt_s=4.0), (L, L, L, L)),
    ],
)
def test_each_definition_tolerates_the_delays_that_it_states(
    token_s: list[float], slo: Slo, expected: tuple[Missed, ...]
) -> None:
    assert tuple(judged(token_s, slo).values()) == expected


THINKER = Slo(ttft_s=1.0, thinking_tbt_s=0.05, tbt_s=0.1)


@pytest.mark.parametrize(
    ("token_s", "thinking", "expected"),
    [
        (paced(0.9, *[0.049] * 20, *[0.099] * 20), 21, (N, N, N, N)),  # each stage at its own pace
        # a quick answer does not make up for slow thinking
        (paced(0.9, *[0.06] * 20, *[0.05] * 30), 21, (B, B, B, N)),
        # nor quick thinking for a slow answer, except by deadlines, which bank slack
        (paced(0.9, *[0.02] * 20, *[0.11] * 20), 21, (N, B, B, N)),
        (paced(0.9, *[0.06] * 20), 21, (B, B, B, L)),  # it ended in thought
        (paced(0.9, *[0.09] * 20), 0, (N, N, N, N)),  # it never thought
        (paced(0.9, *[0.049] * 4, *[0.099] * 6), 5, (N, N, N, N)),  # stages shorter than ten tokens
        (paced(0.9, *[0.049] * 4, *[0.11] * 6), 5, (N, B, B, N)),
        (paced(0.9, 0.09), 1, (N, N, N, N)),  # all its thought is one token: no pace
    ],
)
def test_each_stage_is_judged_by_its_own_pace(
    token_s: list[float], thinking: int, expected: tuple[Missed, ...]
) -> None:
    assert tuple(judged(token_s, THINKER, thinking).values()) == expected


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.floats(0.0, 0.3), min_size=1, max_size=40), st.integers(0, 40), st.floats(0.02, 0.3)
)
def test_two_stages_of_one_pace_are_one_stage_by_deadlines_and_by_the_last_token(
    gaps: list[float], thinking: int, tbt_s: float
) -> None:
    token_s, one, two = (
        np.cumsum(gaps).tolist(),
        Slo(ttft_s=1.0, tbt_s=tbt_s),
        Slo(ttft_s=1.0, tbt_s=tbt_s, thinking_tbt_s=tbt_s),
    )
    plain, staged = judged(token_s, one), judged(token_s, two, min(thinking, len(token_s)))
    assert (plain[DEADLINE], plain[TTLT]) == (staged[DEADLINE], staged[TTLT])


def test_a_request_that_did_not_finish_is_missed_by_every_definition() -> None:
    dropped, never = verdict_of([0.5], CHAT, FinishReason.DROPPED), None
    for definition in DEFINITIONS:
        assert (
            missed(definition, [dropped, never], [CHAT, CHAT], [[0.5], []]).tolist()
            == [Missed.END] * 2
        )


def test_an_unknown_definition_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline, mean-tpot, max-tpot-10, ttlt"):
        missed("p99", [verdict_of([0.5], CHAT)], [CHAT])


outputs = st.lists(st.floats(0.0, 0.3), min_size=1, max_size=60).map(
    lambda gaps: np.cumsum(gaps).tolist()
)


@settings(deadline=None, max_examples=200)
@given(st.lists(outputs, min_size=1, max_size=5))
def test_the_worst_ten_tokens_are_found_in_any_output(several: list[list[float]]) -> None:
    def plainly(token_s: list[float]) -> float:
        spans = [token_s[i : i + 11] for i in range(0, len(token_s) - 10, 10)] + [token_s[-11:]]
        return max(
            ((span[-1] - span[0]) / (len(span) - 1) for span in spans if len(span) > 1), default=0.0
        )

    assert worst_tpot_s(several, block=2) == pytest.approx(
        [plainly(token_s) for token_s in several], abs=1e-12
    )


@settings(deadline=None, max_examples=200)
@given(outputs, st.floats(0.05, 3.0), st.floats(0.02, 0.3))
def test_a_request_that_meets_every_deadline_meets_the_last_one(
    token_s: list[float], ttft_s: float, tbt_s: float
) -> None:
    found = judged(token_s, Slo(ttft_s=ttft_s, tbt_s=tbt_s))
    assert found[DEADLINE] or not found[TTLT]


@settings(deadline=None, max_examples=200)
@given(outputs, st.floats(0.05, 3.0), st.floats(0.02, 0.3))
def test_whole_windows_that_keep_the_pace_keep_it_on_average(
    token_s: list[float], ttft_s: float, tbt_s: float
) -> None:
    found = judged(token_s[: (len(token_s) - 1) // 10 * 10 + 1], Slo(ttft_s=ttft_s, tbt_s=tbt_s))
    assert found[MAX_TPOT_10] or not found[MEAN_TPOT]


@settings(deadline=None, max_examples=100)
@given(outputs, st.floats(0.05, 6.0))
def test_a_tier_with_nothing_but_a_ttlt_is_judged_alike_by_all(
    token_s: list[float], ttlt_s: float
) -> None:
    assert len(set(judged(token_s, Slo(ttlt_s=ttlt_s)).values())) == 1
