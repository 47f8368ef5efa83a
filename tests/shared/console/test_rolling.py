"""Tests of the console's counts over the last minutes: quantiles, and what leaves the window."""

import pytest

from shared.console.rolling import BINS, PART_S, PARTS, WINDOW_S, Rolling, bin_of

NOW = 1_700_000_000.0


@pytest.mark.parametrize("value_s", [0.0011, 0.03, 0.5, 1.0, 59.0, 3600.0])
def test_a_quantile_is_within_five_percent(value_s: float) -> None:
    rolling = Rolling()
    for _ in range(10):
        rolling.latency("ttft", value_s, NOW)
    assert rolling.quantiles("ttft").p50_s == pytest.approx(value_s, rel=0.05)
    assert rolling.quantiles("tbt").p50_s is None


def test_quantiles_are_of_the_whole_window() -> None:
    rolling = Rolling()
    for n in range(100):
        rolling.latency("ttft", 1.0 if n < 98 else 10.0, NOW + n)
    assert rolling.quantiles("ttft").p50_s == pytest.approx(1.0, rel=0.05)
    assert rolling.quantiles("ttft").p99_s == pytest.approx(10.0, rel=0.05)


def test_what_leaves_the_window_is_forgotten() -> None:
    rolling = Rolling()
    rolling.count("met", NOW)
    rolling.latency("ttft", 1.0, NOW)
    rolling.forget(NOW + WINDOW_S - PART_S)
    assert rolling.counts["met"] == 1
    rolling.count("met", NOW + WINDOW_S + PART_S)
    assert rolling.counts["met"] == 1
    assert rolling.quantiles("ttft").p50_s is None


def test_the_history_has_a_point_for_each_stretch_of_the_window() -> None:
    rolling = Rolling()
    for n in range(PARTS):
        rolling.count("offered", NOW + n * PART_S)
        if n >= PARTS / 2:
            rolling.count("met", NOW + n * PART_S)
    history = rolling.history("met", "offered", NOW + (PARTS - 1) * PART_S, 10)
    assert history == [0.0] * 5 + [1.0] * 5
    assert Rolling().history("met", "offered", NOW, 3) == [None, None, None]


@pytest.mark.parametrize("value_s", [float("nan"), float("-inf"), -1.0, 0.0, 1e308, float("inf")])
def test_every_number_has_a_bin(value_s: float) -> None:
    assert 0 <= bin_of(value_s) < BINS
