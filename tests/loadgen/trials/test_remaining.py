"""Tests of the estimates that commands print: how much of the work is left, and for how long."""

import pytest

from loadgen.trials import remaining
from loadgen.trials.goodput import Probe
from loadgen.trials.remaining import Remaining, left, search_left


def probe(rate_rps: float, violated: float) -> Probe:
    return Probe(rate_rps=rate_rps, offered=100, violated_fraction=violated, stopped=False)


def test_what_is_left_takes_as_long_as_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(remaining.time, "perf_counter", lambda: now_s)
    runs = Remaining(4)
    now_s += 10.0
    assert runs.one_done() == "[1/4, about 30 s left]"
    now_s += 190.0
    assert runs.one_done() == "[2/4, about 3 min left]"
    runs.one_done()
    assert runs.one_done() == "[4/4]"
    assert left(0.25, now_s - 20.0) == ", about 60 s left"
    assert left(0.0, now_s) == left(1.0, now_s) == left(1.2, now_s) == ""


def test_a_search_knows_its_end_once_it_has_a_limit_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remaining.time, "perf_counter", lambda: 115.0)
    assert search_left([probe(1.0, 0.0), probe(2.0, 0.0)], 0.01, 0.01, 100.0) == ""
    # between 2 and 4 lie 70 steps of 1 %, which seven halvings make one
    tried = [probe(1.0, 0.0), probe(2.0, 0.01), probe(4.0, 0.5)]
    assert search_left(tried, 0.01, 0.01, 100.0) == ", 7 more rates, about 35 s left"
    assert search_left([probe(3.98, 0.0), probe(4.0, 0.5)], 0.01, 0.01, 100.0) == ""
