"""Tests of the arrival times of a load: they have the rate and the burstiness asked for, repeat for
a seed, and keep the bursts of a recorded load.
"""

import math
from itertools import pairwise
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.arrivals import (
    SHAPES,
    Gaps,
    Warp,
    draw_arrivals,
    parse_gaps,
    parse_profile,
    recorded_arrivals,
)
from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import Trace
from shared.errors import ConfigError

SEEDS = range(4)


def gaps_of(arrivals: list[float]) -> list[float]:
    return [b - a for a, b in pairwise(arrivals)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_the_mean_rate_and_the_variation_of_the_gaps_are_those_asked_for(
    seed: int, cv: float
) -> None:
    arrivals = draw_arrivals(Gaps(cv), rate=20.0, duration_s=2000.0, seed=seed)
    n = len(arrivals)
    assert n == pytest.approx(40_000, abs=5 * cv * math.sqrt(40_000))  # five standard deviations
    gaps = gaps_of(arrivals)
    assert stdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.08)
    assert arrivals == sorted(arrivals)
    assert arrivals[0] >= 0
    assert arrivals[-1] < 2000.0


def test_the_same_seed_gives_the_same_arrivals_and_another_does_not() -> None:
    assert draw_arrivals(Gaps(), 5.0, 100.0, 1) == draw_arrivals(Gaps(), 5.0, 100.0, 1)
    assert draw_arrivals(Gaps(), 5.0, 100.0, 1) != draw_arrivals(Gaps(), 5.0, 100.0, 2)


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = draw_arrivals(Gaps(2.0), 5.0, 50.0, 1), draw_arrivals(Gaps(2.0), 5.0, 500.0, 1)
    assert long[: len(short)] == short


def test_even_gaps_are_a_metronome() -> None:
    assert gaps_of(draw_arrivals(Gaps(0.0), 4.0, 10.0, 1)) == pytest.approx([0.25] * 38)


@pytest.mark.parametrize("seed", SEEDS)
def test_bursts_come_when_the_profile_says(seed: int) -> None:
    arrivals = draw_arrivals(Gaps(), 50.0, 300.0, seed, parse_profile("20:0.5,10:3,30:0", 300.0))
    at = [a % 60 for a in arrivals]
    assert sum(a < 20 for a in at) == pytest.approx(50 * 0.5 * 20 * 5, rel=0.1)
    assert sum(20 <= a < 30 for a in at) == pytest.approx(50 * 3 * 10 * 5, rel=0.1)
    assert sum(a >= 30 for a in at) == 0


@pytest.mark.parametrize("name", SHAPES)
def test_the_recorded_shapes_leave_the_mean_rate_alone(name: str) -> None:
    profile = parse_profile(name, 60.0)
    assert sum(seconds for seconds, _ in profile) == pytest.approx(60.0)
    assert sum(seconds * multiple for seconds, multiple in profile) / 60.0 == pytest.approx(
        1.0, abs=0.01
    )


@given(
    st.lists(
        st.tuples(st.floats(0.1, 50), st.sampled_from([0.0, 0.25, 1.0, 3.0])),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 200),
)
def test_warping_inverts_the_integral_of_the_profile(
    profile: list[tuple[float, float]], operational: float
) -> None:
    if all(multiple == 0 for _, multiple in profile):
        return
    at_s = Warp(profile).seconds(operational)
    period_s, area = sum(s for s, _ in profile), sum(s * m for s, m in profile)
    cycles, within_s = divmod(at_s, period_s)
    done = cycles * area
    for seconds, multiple in profile:
        done += min(seconds, max(0.0, within_s)) * multiple
        within_s -= seconds
    assert done == pytest.approx(operational, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    "text", ["gamma", "gamma:", "gamma:x", "gamma:-1", "gamma:nan", "weibull", ""]
)
def test_unknown_arrivals_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected poisson, gamma:CV"):
        parse_gaps(text)


@pytest.mark.parametrize("text", ["", "5", "5:x", "0:1", "5:-1", "5:0", "5:inf", "5:1:2"])
def test_a_bad_profile_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected SECONDS:MULTIPLE"):
        parse_profile(text, 60.0)


def recorded(n: int, gap_s: float) -> Trace:
    return Trace("t", [TraceRow(i * gap_s, i + 1, 1, "x") for i in range(n)])


def test_recorded_arrivals_are_as_recorded_unless_a_rate_is_asked_for() -> None:
    kept, squeeze = recorded_arrivals(recorded(1000, 0.1), None, 30.0, 0)
    assert squeeze == 1.0
    assert [row.arrival_s for row in kept.rows] == pytest.approx([i / 10 for i in range(300)])


def test_a_lower_rate_thins_and_a_higher_one_compresses_time() -> None:
    thin, squeeze = recorded_arrivals(recorded(10_000, 0.1), 2.0, 1000.0, 5)
    assert squeeze == 1.0
    assert len(thin.rows) == pytest.approx(2000, abs=200)
    dense, squeeze = recorded_arrivals(recorded(10_000, 0.1), 20.0, 100.0, 5)
    assert squeeze == pytest.approx(2.0, rel=0.01)
    assert len(dense.rows) == pytest.approx(2000, abs=20)


def test_lengths_alone_cannot_be_replayed_as_recorded() -> None:
    with pytest.raises(ConfigError, match="has no arrival times"):
        recorded_arrivals(Trace("t", [TraceRow(None, 1, 1, "x")]), None, 10.0, 0)
