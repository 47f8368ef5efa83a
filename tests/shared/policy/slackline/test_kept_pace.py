"""Slackline gives up a pace that costs more requests than have it."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.lab.papers.drawn import mix
from loadgen.lab.papers.run import execute
from shared.policy.lengths import MIN_ENDS, OutputLengths
from shared.policy.seam import Ended
from shared.policy.slackline.kept_pace import FADES_REQUESTS, FADES_S, KINDS, USABLE, Demand
from shared.vocabulary import Definition, RequestKey, Slo
from tests.rings import slow_but
from tests.shared.policy.paced_load import serve
from tests.shared.policy.slos_serve.slos_serving import offer

PASS_S = 0.004  # the fixed part of a batch
TIGHT_S, LOOSE_S = 0.005, 0.05


def lengths(tokens: int = 1, *, known: bool = True) -> OutputLengths:
    """Outputs of so many tokens each."""
    found = OutputLengths()
    for _ in range(MIN_ENDS if known else 0):
        found.observe(
            Ended(offer().application, prompt_tokens=10, max_tokens=tokens, output_tokens=tokens)
        )
    return found


def kept_s(
    demand: Demand, pass_s: float = PASS_S, *, speed: float = 1.0, at_s: float = 1.0
) -> float:
    return demand.kept_s(at_s, pass_s, speed, lengths())


def mean_slo(pace_s: float) -> Slo:
    return Slo(ttft_s=1.0, tbt_s=pace_s, definition=Definition.MEAN_TPOT)


def offered(
    tight: int,
    loose: int,
    *,
    seconds: float = 0.02,
    ttft_s: float | None = 1.0,
    ttlt_s: float | None = None,
    definition: Definition = Definition.MEAN_TPOT,
) -> Demand:
    """The demand after so many requests of either pace came within a second."""
    demand = Demand()
    paces = [TIGHT_S] * tight + [LOOSE_S] * loose
    offers = [
        offer(
            key=RequestKey(f"t.{n}"),
            slo=Slo(ttft_s=ttft_s, tbt_s=pace_s, ttlt_s=ttlt_s, definition=definition),
        )
        for n, pace_s in enumerate(paces)
    ]
    each_s = np.full(len(offers), seconds)
    demand.offered(offers, 0.0, each_s, each_s)
    return demand


def test_a_tight_pace_of_few_that_costs_many_is_given_up() -> None:
    # a twentieth of the time is left beside passes every 5 ms; 25 requests need all of it
    assert kept_s(offered(5, 20)) == LOOSE_S


@pytest.mark.parametrize(
    ("definition", "kept"), [(Definition.DEADLINE, 0.0), (Definition.MEAN_TPOT, LOOSE_S)]
)
def test_a_first_token_long_before_it_is_due_earns_time_where_deadlines_judge(
    definition: Definition, kept: float
) -> None:
    """The TTFT is 0.1 s for each of ten tokens: then 5 ms are no tight pace."""
    demand = offered(5, 20, seconds=0.0025, definition=definition)
    assert demand.kept_s(1.0, PASS_S, 1.0, lengths(10)) == kept
    assert demand.kept_s(1.0, PASS_S, 1.0, lengths(10_000)) == pytest.approx(LOOSE_S, rel=0.01)


def test_a_pace_is_kept_where_there_is_time_for_all() -> None:
    assert kept_s(offered(1, 2, seconds=0.001)) == 0.0
    # where drafts make passes short enough
    assert kept_s(offered(5, 20), speed=8.0) == 0.0


def test_a_pace_is_kept_while_what_comes_is_taken() -> None:
    """The reckoning does not know that early tokens earn time."""
    demand = offered(5, 20)
    demand.taken(25.0, 0.0)
    assert kept_s(demand) == 0.0


def test_a_pace_is_given_up_where_a_looser_one_serves_more_than_was_taken() -> None:
    demand = offered(20, 20, seconds=0.01)
    demand.taken(30.0, 0.0)
    assert kept_s(demand) == 0.0  # with the looser one there is time for 20
    demand.taken(-15.0, 0.0)  # they gave way
    assert kept_s(demand) == LOOSE_S


def test_a_pace_that_was_given_up_is_kept_again_when_there_is_time_for_all() -> None:
    demand = offered(20, 20, seconds=0.01)
    assert kept_s(demand) == LOOSE_S
    few = [
        offer(key=RequestKey(f"f.{n}"), slo=mean_slo(pace_s))
        for n, pace_s in enumerate([TIGHT_S, LOOSE_S] * 2)
    ]
    demand.offered(few, 8 * FADES_S, each_s := np.full(4, 0.001), each_s)
    assert kept_s(demand, at_s=8 * FADES_S) == 0.0


def test_no_pace_is_given_up_for_outputs_whose_length_is_unknown() -> None:
    demand = Demand()
    offers = [
        offer(key=RequestKey(f"t.{n}"), slo=mean_slo(pace_s))
        for n, pace_s in enumerate([TIGHT_S, LOOSE_S] * 20)
    ]
    demand.offered(offers, 0.0, np.zeros(40), np.full(40, 0.02))
    assert demand.kept_s(1.0, PASS_S, 1.0, lengths()) == LOOSE_S
    demand = Demand()
    demand.offered(offers, 0.0, np.zeros(40), np.full(40, 0.02))
    assert demand.kept_s(1.0, PASS_S, 1.0, lengths(known=False)) == 0.0


def test_a_hundred_requests_are_enough_to_see_another_load() -> None:
    """At 200 requests/s that is half a second, where at 5 it is as long as anything counts."""
    demand = offered(0, 1)
    for n in range(2 * FADES_REQUESTS):
        one = offer(key=RequestKey(f"n.{n}"), slo=Slo(ttft_s=1.0, tbt_s=TIGHT_S))
        demand.offered([one], 0.005 * n, np.ones(1), np.ones(1))
    assert demand.paces == 2
    for n in range(10 * FADES_REQUESTS):
        one = offer(key=RequestKey(f"o.{n}"), slo=Slo(ttft_s=1.0, tbt_s=TIGHT_S))
        demand.offered([one], 1.0, np.ones(1), np.ones(1))
    assert demand.paces == 1


def test_windows_of_ten_count_on_a_part_of_the_drafts_alone() -> None:
    """With them, that all were taken does not say that they keep their pace."""

    def kept(definition: Definition, speed: float, pass_s: float = PASS_S) -> float:
        demand = offered(5, 20, seconds=0.04, definition=definition)
        demand.taken(25.0, 0.0)
        return kept_s(demand, pass_s, speed=speed)

    windows = Definition.MAX_TPOT_10
    assert kept(Definition.MEAN_TPOT, 2.0) == 0.0
    assert kept(windows, 2.0) == LOOSE_S
    # and where they need none, or where there is time for all, the pace is kept
    assert kept(windows, 1.0, PASS_S / 3) == 0.0
    few = offered(1, 2, seconds=0.001, definition=windows)
    assert kept_s(few, speed=2.0) == 0.0


def test_a_pace_that_most_have_is_kept() -> None:
    assert kept_s(offered(19, 1), 0.001) == 0.0


def test_a_pace_of_the_less_important_is_not_given_up_for_their_time_alone() -> None:
    """The door says who is served, the important first."""
    demand = Demand()
    offers = [
        offer(key=RequestKey(f"t.{n}"), slo=Slo(ttft_s=1.0, tbt_s=pace_s), importance=importance)
        for n, (pace_s, importance) in enumerate([(0.09, 1.0), (0.11, 3.0)] * 20)
    ]
    each_s = np.full(len(offers), 0.05)
    demand.offered(offers, 0.0, each_s, each_s)
    demand.taken(3.0 * 20, 0.0)
    assert kept_s(demand, 0.01) == 0.0


def test_what_another_replica_has_declined_does_not_count() -> None:
    """Else each replica of a fleet takes the demand of all for its own."""
    demand = Demand()
    again = offer(key=RequestKey("t.1"), slo=Slo(ttft_s=1.0, tbt_s=TIGHT_S), attempt=2)
    demand.offered([again], 0.0, np.ones(1), np.ones(1))
    assert demand.paces == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3016, 3031, 3035])
def test_no_pace_is_given_up_for_paces_that_are_nearly_as_tight(seed: int) -> None:
    """With each of these, requests were declined for a looser pace that served no more."""
    run = mix(seed, 400)

    def missed(settings: dict[str, str]) -> float:
        figures = execute(replace(run, policy="slackline", settings=settings)).figures
        assert figures is not None
        return figures.violated_fraction

    assert missed({}) <= missed({"without": "kept_pace"}) + 0.01


def test_requests_of_one_pace_and_those_that_can_wait_change_nothing() -> None:
    assert offered(20, 0).paces == 1
    assert offered(5, 20, ttft_s=None, ttlt_s=60.0).paces == 0
    assert offered(5, 20, ttlt_s=60.0).paces == 2, "they wait no longer than for their TTFT"


def test_a_caller_with_ever_new_paces_does_not_make_it_slow() -> None:
    demand = Demand()
    for n in range(3 * KINDS):
        one = offer(key=RequestKey(f"t.{n}"), slo=Slo(ttft_s=1.0, tbt_s=0.01 + 0.001 * n))
        demand.offered([one], 0.0, np.ones(1), np.ones(1))
    assert demand.paces == KINDS


def test_what_came_long_ago_is_forgotten() -> None:
    demand = offered(5, 20)
    assert kept_s(demand) == LOOSE_S
    assert kept_s(demand, at_s=10 * FADES_S) == 0.0


@given(
    st.integers(0, 40), st.integers(0, 40), st.floats(1e-4, 0.1), st.floats(1e-4, 0.1),
    st.floats(1.0, 4.0),
)  # fmt: skip
def test_no_pace_is_given_up_while_there_is_time_for_all_or_for_nobody_else(
    tight: int, loose: int, seconds: float, pass_s: float, speed: float
) -> None:
    kept = kept_s(offered(tight, loose, seconds=seconds), pass_s, speed=speed)
    assert kept in (0.0, LOOSE_S)
    work_s = (tight + loose) * seconds * (1 + 1 / speed)  # within a second
    if work_s <= USABLE - pass_s / speed / TIGHT_S or not loose:
        assert kept == 0.0


@pytest.mark.slow
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


@pytest.mark.parametrize("seed", slow_but([1], [1, 2]))
def test_where_deadlines_judge_a_pace_is_kept_by_tokens_that_come_early(
    seed: int, tmp_path: Path
) -> None:
    """A pass of eight decodes takes longer than the pace of half of the requests. But the first
    token comes half a second before it is due.
    """

    def met(policy: str) -> float:
        return serve(
            policy, tmp_path, (0.0045, 0.02), (20.0, 20.0), batch_s=0.003, token_s=1.2e-4,
            definition=Definition.DEADLINE, seed=seed,
        ).met_fraction  # fmt: skip

    assert met("slackline") >= met("qoserve") - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_of_three_paces_the_tightest_is_given_up_where_it_costs_the_others_theirs(
    seed: int, tmp_path: Path
) -> None:
    """Passes every 6 ms leave half of the time; the two thirds of the requests with looser paces
    have time enough if that pace is given up. At a lower rate there is time for all.
    """

    def met(rate_per_s: float) -> float:
        return serve(
            "slackline", tmp_path, (0.006, 0.012, 0.03), [rate_per_s] * 3,
            batch_s=0.003, token_s=1.2e-4, seed=seed,
        ).met_fraction  # fmt: skip

    assert met(40.0) >= 0.93 * 2 / 3
    assert met(10.0) >= 0.97
