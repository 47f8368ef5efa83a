"""Tests of the five definitions of a met SLO: which delays each of them tolerates."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.record.judgement import missed
from shared.measure import Measure
from shared.vocabulary import Definition, Missed, Slo

DEADLINE, MEAN_TPOT, MAX_TPOT_10, TTLT, EVERY_GAP = Definition
CHAT = Slo(ttft_s=1.0, tbt_s=0.1)
SUMMARY = Slo(ttlt_s=5.0)


def measure_of(token_s: Sequence[float], slo: Slo, thinking: int = 0, together: int = 1) -> Measure:
    """The measure of a request that arrived at 0, as a worker folds it. So many tokens come
    `together`, when the last of them is made; the worker finds when its thinking has ended.
    """
    measure = Measure.begin(slo, 0.0)
    for begin in range(0, len(token_s), together):
        some = token_s[begin : begin + together]
        known = thinking if begin + len(some) >= thinking else None
        measure = measure.emit(len(some), some[-1], slo, known)
    return measure


def judged(token_s: Sequence[float], slo: Slo = CHAT, thinking: int = 0) -> dict[str, Missed]:
    """The outcome by each definition."""
    found = {}
    for definition in Definition:
        judging = replace(slo, definition=definition)
        found[definition.value] = missed(measure_of(token_s, judging, thinking), judging, 0.0)
    return found


def paced(first_s: float, *gaps_s: float) -> list[float]:
    return [first_s, *(first_s + np.cumsum(gaps_s)).tolist()]


N, F, B, L = Missed.NOTHING, Missed.TTFT, Missed.TBT, Missed.TTLT


@pytest.mark.parametrize(
    ("token_s", "slo", "expected"),  # by deadline, mean-tpot, max-tpot-10, ttlt, every-gap
    [
        (paced(0.5, *[0.09] * 20), CHAT, (N, N, N, N, N)),
        # late at first, and ahead of its pace at the end
        (paced(1.2, *[0.05] * 20), CHAT, (F, F, F, N, F)),
        # one stall that no slack covers; 0.085 over its first ten tokens
        (paced(0.9, 0.4, *[0.05] * 19), CHAT, (B, N, N, N, B)),
        # ten slow tokens after ten quick ones that bank 0.6 s
        (paced(0.9, *[0.05] * 10, *[0.12] * 10), CHAT, (N, N, B, N, B)),
        # always too slow, from a head start of 0.9 s
        (paced(0.1, *[0.12] * 20), CHAT, (N, B, B, N, B)),
        (paced(0.9, *[0.12] * 20), CHAT, (B, B, B, L, B)),
        ([0.9], CHAT, (N, N, N, N, N)),  # one token has no pace
        ([1.1], CHAT, (F, F, F, L, F)),  # its first token is its last
        (paced(3.0, *[0.5] * 4), SUMMARY, (N, N, N, N, N)),
        (paced(3.0, *[0.5] * 5), SUMMARY, (L, L, L, L, L)),
        (paced(2.0, *[0.2] * 5), Slo(ttft_s=1.0), (F, F, F, F, F)),  # nothing else to be held to
        # its pace counts from its first token
        (paced(9.0, *[0.09] * 20), Slo(tbt_s=0.1), (N, N, N, N, N)),
        (paced(9.0, *[0.11] * 20), Slo(tbt_s=0.1), (B, B, B, L, B)),
        (paced(0.5, *[0.09] * 50), Slo(ttft_s=1.0, tbt_s=0.1, ttlt_s=4.0), (L, L, L, L, L)),
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
        (
            paced(0.9, *[0.049] * 20, *[0.099] * 20),
            21,
            (N, N, N, N, N),
        ),  # each stage at its own pace
        # a quick answer does not make up for slow thinking
        (paced(0.9, *[0.06] * 20, *[0.05] * 30), 21, (B, B, B, N, B)),
        # nor quick thinking for a slow answer, except by deadlines, which bank slack
        (paced(0.9, *[0.02] * 20, *[0.11] * 20), 21, (N, B, B, N, B)),
        (paced(0.9, *[0.06] * 20), 21, (B, B, B, L, B)),  # it ended in thought
        (paced(0.9, *[0.09] * 20), 0, (N, N, N, N, N)),  # it never thought
        (
            paced(0.9, *[0.049] * 4, *[0.099] * 6),
            5,
            (N, N, N, N, N),
        ),  # stages shorter than ten tokens
        (paced(0.9, *[0.049] * 4, *[0.11] * 6), 5, (N, B, B, N, B)),
        (paced(0.9, 0.09), 1, (N, N, N, N, N)),  # all its thought is one token: no pace
        (paced(0.9, 0.04, 0.09, 0.09), 2, (N, N, N, N, N)),  # a gap has the pace of its first token
    ],
)
def test_each_stage_is_judged_by_its_own_pace(
    token_s: list[float], thinking: int, expected: tuple[Missed, ...]
) -> None:
    assert tuple(judged(token_s, THINKER, thinking).values()) == expected


@pytest.mark.parametrize(
    ("share", "long_gaps", "expected"),
    [(None, 0, N), (None, 1, B), (0.05, 1, N), (0.05, 2, B), (0.1, 2, N)],
)
def test_every_gap_is_within_the_pace_but_for_a_stated_share(
    share: float | None, long_gaps: int, expected: Missed
) -> None:
    slo = replace(CHAT, definition=EVERY_GAP, long_gap_share=share)
    token_s = paced(0.2, *[0.01] * (20 - long_gaps), *[0.4] * long_gaps)
    measure = measure_of(token_s, slo)
    assert (measure.long_gaps, missed(measure, slo, 0.0)) == (long_gaps, expected)
    # tokens that come together have no gap between them, and one before the first of them
    assert measure_of(token_s, slo, together=3).long_gaps == (long_gaps > 0)


def test_a_request_without_a_token_is_missed_by_every_definition() -> None:
    assert set(judged([]).values()) == {Missed.END}


outputs = st.lists(st.floats(0.0, 0.3), min_size=1, max_size=60).map(
    lambda gaps: np.cumsum(gaps).tolist()
)


def plainly(token_s: Sequence[float]) -> float:
    """The worst mean over each ten tokens, and over the last ten."""
    spans = [token_s[i : i + 11] for i in range(0, len(token_s) - 10, 10)] + [token_s[-11:]]
    return max(
        ((span[-1] - span[0]) / (len(span) - 1) for span in spans if len(span) > 1), default=0.0
    )


@given(outputs, st.integers(0, 61), st.integers(1, 6))
def test_the_worst_ten_tokens_of_each_stage_are_found_in_any_output(
    token_s: list[float], thinking: int, together: int
) -> None:
    slo = Slo(thinking_tbt_s=0.1, tbt_s=0.1, definition=MAX_TPOT_10)
    at_s = [
        token_s[min(i // together * together + together, len(token_s)) - 1]
        for i in range(len(token_s))
    ]
    windows = measure_of(token_s, slo, thinking, together).windows
    assert windows is not None
    if 0 < thinking < len(at_s):
        worst_s = (windows.thinking_worst_s, windows.present_s())
        expected_s = (plainly(at_s[:thinking]), plainly(at_s[thinking - 1 :]))
    else:
        worst_s, expected_s = (windows.present_s(),), (plainly(at_s),)
    assert worst_s == pytest.approx(expected_s, abs=1e-12)


def test_a_measure_keeps_its_windows_wherever_it_is_written() -> None:
    slo = replace(CHAT, definition=MAX_TPOT_10)
    measure = measure_of(paced(0.5, *[0.02] * 9, 0.5, *[0.02] * 20), slo)
    moved = msgspec.msgpack.decode(msgspec.msgpack.encode(measure), type=Measure)
    assert moved == measure
    assert moved.emit(3, 2.0, slo) == measure.emit(3, 2.0, slo)
