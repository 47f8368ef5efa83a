"""Slackline gives up a pace that costs more requests than have it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.results.experiment import execute
from loadgen.results.slackline.mixes import mix
from shared.policy.slackline.kept_pace import FADES_S, KINDS, USABLE, Demand
from shared.vocabulary import Definition, RequestKey, Slo
from tests.shared.policy.paced_load import serve
from tests.shared.policy.slos_serving import offer

PASS_S = 0.004  # the fixed part of a batch
TIGHT_S, LOOSE_S = 0.005, 0.05


def offered(
    tight: int,
    loose: int,
    *,
    seconds: float = 0.02,
    ttlt_s: float | None = None,
    definition: Definition = Definition.DEADLINE,
) -> Demand:
    """The demand after so many requests of either pace came within a second."""
    demand = Demand()
    paces = [TIGHT_S] * tight + [LOOSE_S] * loose
    offers = [
        offer(
            key=RequestKey(f"t.{n}"),
            slo=Slo(ttft_s=1.0, tbt_s=pace_s, ttlt_s=ttlt_s, definition=definition),
        )
        for n, pace_s in enumerate(paces)
    ]
    each_s = np.full(len(offers), seconds)
    demand.offered(offers, 0.0, each_s, each_s)
    return demand


def test_a_tight_pace_of_few_that_costs_many_is_given_up() -> None:
    # a twentieth of the time is left beside passes every 5 ms; 25 requests need all of it
    assert offered(5, 20).kept_s(1.0, PASS_S, speed=1.0) == LOOSE_S


def test_a_pace_is_kept_where_there_is_time_for_all() -> None:
    assert offered(1, 2, seconds=0.001).kept_s(1.0, PASS_S, speed=1.0) == 0.0
    # where drafts make passes short enough
    assert offered(5, 20).kept_s(1.0, PASS_S, speed=8.0) == 0.0


def test_windows_of_ten_count_on_a_part_of_the_drafts_alone() -> None:
    windows = Definition.MAX_TPOT_10
    assert offered(5, 20).kept_s(1.0, PASS_S, speed=2.0) == 0.0
    assert offered(5, 20, definition=windows).kept_s(1.0, PASS_S, speed=2.0) == LOOSE_S
    # and where they need none, or where there is time for all, the pace is kept
    assert offered(5, 20, definition=windows).kept_s(1.0, PASS_S / 3, speed=1.0) == 0.0
    few = offered(1, 2, seconds=0.001, definition=windows)
    assert few.kept_s(1.0, PASS_S, speed=2.0) == 0.0


def test_a_pace_that_most_have_is_kept() -> None:
    assert offered(19, 1).kept_s(1.0, 0.001, speed=1.0) == 0.0


def test_a_pace_of_the_less_important_is_not_given_up_for_their_time_alone() -> None:
    """The door says who is served, the important first."""
    demand = Demand()
    offers = [
        offer(key=RequestKey(f"t.{n}"), slo=Slo(ttft_s=1.0, tbt_s=pace_s), importance=importance)
        for n, (pace_s, importance) in enumerate([(0.09, 1.0), (0.11, 3.0)] * 20)
    ]
    each_s = np.full(len(offers), 0.05)
    demand.offered(offers, 0.0, each_s, each_s)
    assert demand.kept_s(1.0, 0.01, speed=1.0) == 0.0


def test_what_another_replica_has_declined_does_not_count() -> None:
    """Else each replica of a fleet takes the demand of all for its own."""
    demand = Demand()
    again = offer(key=RequestKey("t.1"), slo=Slo(ttft_s=1.0, tbt_s=TIGHT_S), attempt=2)
    demand.offered([again], 0.0, np.ones(1), np.ones(1))
    assert demand.kinds == 0


@pytest.mark.parametrize("seed", [3016, 3031, 3035])
def test_no_pace_is_given_up_for_paces_that_are_nearly_as_tight(seed: int) -> None:
    """With each of these, requests were declined for a looser pace that served no more."""
    run = mix(seed, 400)

    def missed(settings: dict[str, str]) -> float:
        figures = execute(replace(run, policy="slackline", settings=settings)).figures
        assert figures is not None
        return figures.violated_fraction

    assert missed({}) <= missed({"without": "kept_pace"}) + 0.01


def test_requests_of_one_pace_and_those_with_a_ttlt_change_nothing() -> None:
    assert offered(20, 0).kinds == 1
    assert offered(5, 20, ttlt_s=60.0).kinds == 0


def test_a_caller_with_ever_new_paces_does_not_make_it_slow() -> None:
    demand = Demand()
    for n in range(3 * KINDS):
        one = offer(key=RequestKey(f"t.{n}"), slo=Slo(ttft_s=1.0, tbt_s=0.01 + 0.001 * n))
        demand.offered([one], 0.0, np.ones(1), np.ones(1))
    assert demand.kinds == KINDS


def test_what_came_long_ago_is_forgotten() -> None:
    demand = offered(5, 20)
    assert demand.kept_s(1.0, PASS_S, speed=1.0) == LOOSE_S
    assert demand.kept_s(10 * FADES_S, PASS_S, speed=1.0) == 0.0


@given(
    st.integers(0, 40), st.integers(0, 40), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1),
    st.floats(1.0, 4.0),
)  # fmt: skip
def test_no_pace_is_given_up_while_there_is_time_for_all_or_for_nobody_else(
    tight: int, loose: int, seconds: float, pass_s: float, speed: float
) -> None:
    kept_s = offered(tight, loose, seconds=seconds).kept_s(1.0, pass_s, speed)
    assert kept_s in (0.0, LOOSE_S)
    work_s = (tight + loose) * seconds * (1 + 1 / speed)  # within a second
    if work_s <= USABLE - pass_s / speed / TIGHT_S or not loose:
        assert kept_s == 0.0


@pytest.mark.parametrize("tight_s", [0.005, 0.006])
def test_a_pace_that_can_hardly_be_kept_does_not_cost_the_others_theirs(
    tight_s: float, tmp_path: Path
) -> None:
    """A pass of eight decodes takes 6.3 ms, and beside a prompt 11.7."""

    def met(policy: str) -> float:
        return serve(
            policy, tmp_path, (tight_s, 0.03), (15.0, 15.0), batch_s=0.0034, token_s=2.6e-4
        ).met_fraction

    ours = met("slackline")
    theirs = {policy: met(policy) for policy in ("slos_serve", "qoserve")}
    assert ours >= max(theirs.values()) - 0.03, f"{ours}: {theirs}"
