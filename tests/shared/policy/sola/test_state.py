"""Tests of SOLA's state monitor, and of which of its two problems an iteration solves."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st

from shared.policy.sola.problem import Problem, Window, attained, fulfilment, level
from tests.shared.policy.sola.test_sola import decoding, planned, seen_as, sola, state_of, waiting
from tests.shared.policy.views import NOW

# ---------------------------------------------------------------- state monitor (section 4.3)


def test_a_first_token_that_came_just_now_has_no_tpot_yet() -> None:
    assert len(state_of(seen_as([decoding(0, since_first_s=0.0, generated=1)])).tpot_ratios) == 0


def test_real_time_ttft_runs_while_a_request_waits_and_stays_what_it_became() -> None:
    seen = seen_as([waiting(0, since_s=0.1), decoding(1, since_first_s=2.0, generated=10)])
    seen = replace(seen, first_token_unix_s=np.array([math.inf, NOW - 1.7]))
    assert state_of(seen).ttft_ratios == pytest.approx([0.25, 0.75])
    assert state_of(replace(seen, start_unix_s=NOW + 0.1)).ttft_ratios == pytest.approx([0.5, 0.75])


def test_a_ttlt_bounds_the_first_token_by_what_the_output_needs_and_then_the_pace() -> None:
    row = {"ttft_s": math.inf, "tbt_s": math.inf, "ttlt_s": 3.0}
    seen = seen_as(
        [waiting(0, since_s=0.5, **row), decoding(1, since_first_s=1.0, generated=50, **row)]
    )
    state = state_of(seen, left_out=100.0, decode_s=0.01)
    assert state.ttft_ratios == pytest.approx([0.25])  # 0.5 s of 3 s less 100 decodes of 10 ms
    assert state.tpot_ratios == pytest.approx([0.02 / 0.02])  # 3 s over 50 + 100 tokens; 1 s for 50


# ---------------------------------------------------------------- which problem (section 4.4.1)


def test_the_level_maximum_is_the_largest_of_the_share_that_is_smallest() -> None:
    ratios = np.array([1.2, 0.5, 2.0, 0.8])
    assert [level(ratios, share) for share in (1.0, 0.75, 0.6, 0.5, 0.25)] == [
        2.0,
        1.2,
        1.2,
        0.8,
        0.5,
    ]
    assert attained(ratios) == 0.5
    assert (level(ratios[:0], 1.0), attained(ratios[:0])) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("ttft", "tpot", "expected"),
    [
        ([0.2, 0.5], [0.7], (0.5, 0.7)),  # both below 1
        ([0.2, 0.5], [0.7, 1.7], (0.5, 1.7)),
        ([0.2, 1.5], [0.7], (1.5, 0.7)),
        # both above: TPOT holds at 75 %, and TTFT does not
        ([0.5, 1.5], [0.9, 0.8, 0.7, 1.1], (1.5, 0.9)),
        ([0.5, 0.4, 1.2, 0.3], [0.9, 2.0], (0.5, 2.0)),  # the other way round
        ([0.5, 1.2], [0.9, 2.0], (0.5, 0.9)),  # alike: both hold at 50 %
        ([1.5], [1.2, 1.1], (1.5, 1.2)),  # neither holds for anybody
    ],
)
def test_constraints_are_loosened_only_when_both_are_broken_and_until_one_holds(
    ttft: list[float], tpot: list[float], expected: tuple[float, float]
) -> None:
    assert fulfilment(np.array(ttft), np.array(tpot)) == expected


ratios = st.lists(st.floats(0, 3), max_size=12).map(
    lambda values: np.array(values, dtype=np.float64)
)


def test_the_window_lets_one_sudden_change_pass() -> None:
    window = Window(3)
    asked = [(0.2, 0.5), (0.2, 0.5), (0.6, 0.5), (0.6, 0.5), (0.7, 0.5)]
    assert [window.problem(at, *p) for at, p in enumerate(asked)] == [
        Problem.TPOT,
        Problem.TPOT,
        Problem.TPOT,  # -0.3 - 0.3 + 0.1
        Problem.TPOT,  # -0.3 + 0.1 + 0.1
        Problem.TTFT,
    ]


def test_asking_again_for_the_same_iteration_counts_once() -> None:
    window = Window(3)
    for _ in range(3):
        assert window.problem(1.0, 0.2, 0.5) is Problem.TPOT
    assert window.problem(2.0, 0.9, 0.5) is Problem.TTFT


def test_without_a_prefill_waiting_the_window_begins_anew() -> None:
    calm = [decoding(0, since_first_s=0.6, generated=10), waiting(1, since_s=0.1)]
    sudden = [calm[0], waiting(2, since_s=0.28)]
    for between, begins in ((calm, False), (calm[:1], True)):
        policy = sola(window=4)
        for n, now in enumerate((calm, calm, between)):
            policy.plan(replace(seen_as(now), start_unix_s=NOW + n * 1e-6))
        assert (2 in planned(replace(seen_as(sudden), start_unix_s=NOW + 1e-5), policy)) == begins
