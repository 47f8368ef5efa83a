"""SLOs that name several bounds, a TTFT, a pace and a TTLT: slackline holds each that counts."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import DRAFT
from shared.policy import chunk, registry
from shared.policy.lengths import OutputLengths
from shared.policy.seam import View
from shared.policy.slackline.crowd import asked_of, present_of
from shared.policy.slackline.due import as_judged, due_of_offers, due_of_rows, eased
from shared.policy.slackline.hurry import without_hurry
from shared.policy.slackline.price import prices_of
from shared.policy.slackline.work_ahead import unhurried, work_of_offers, work_of_rows
from shared.rules.tiers import Tier, TierSet
from shared.schemas import Offer
from shared.vocabulary import Definition, RequestKey, ServiceClass, Slo
from tests.shared.policy.drawn_loads import Load, requests_of
from tests.shared.policy.views import NOW, Row, decode, interactive, summary, view

AN_HOUR_S = 3600.0
STEP_S = 0.02
BY_TOKENS = (Definition.DEADLINE, Definition.MEAN_TPOT, Definition.MAX_TPOT_10)

loads = st.fixed_dictionaries(
    {
        "workload": st.sampled_from(("chatbot", "coder", "mix")),
        "times": st.sampled_from((0.8, 1.2, 1.6)),
        "burstiness": st.sampled_from((1.0, 3.0)),
        "replicas": st.sampled_from((1, 2)),
        "draft": st.sampled_from((0.0, DRAFT)),
        "seed": st.integers(0, 999),
    }
)


def met(load: Load, slos: Sequence[Slo], definition: Definition, *, draft: bool) -> list[bool]:
    """The requests whose SLO was met, in a load of one tier for each of the SLOs."""
    tiers = TierSet(
        name="several", default="t0", tiers={f"t{n}": Tier(slo=slo) for n, slo in enumerate(slos)}
    ).judged_by(definition)
    requests = requests_of(load["workload"], load, tiers, 150, load["replicas"])
    deployment = Deployment(
        "slackline", "a100-llama3-8b", load["replicas"], draft=load["draft"] if draft else 0.0
    )
    result = simulate(Traffic(requests, tiers, load["seed"]), deployment, RunOptions())
    return [verdict is not None and verdict.slo_met for verdict in result.verdicts]


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(
    load=loads,
    definition=st.sampled_from(BY_TOKENS),
    paces_s=st.lists(st.floats(0.03, 0.1), min_size=1, max_size=2),
    ttft_s=st.sampled_from((None, 0.6, 2.4)),
)
def test_a_ttlt_that_nothing_can_break_changes_nothing(
    load: Load, definition: Definition, paces_s: Sequence[float], ttft_s: float | None
) -> None:
    """Requests without a TTFT are due an hour after they came, with a TTLT of ten hours, too."""
    slos = [Slo(ttft_s=ttft_s or AN_HOUR_S, tbt_s=pace_s) for pace_s in paces_s]
    also = [replace(slo, ttlt_s=10 * AN_HOUR_S) for slo in slos]
    assert met(load, also, definition, draft=True) == met(load, slos, definition, draft=True)


@pytest.mark.slow
@settings(deadline=None, max_examples=4)
@given(load=loads, ttlt_s=st.sampled_from((10.0, 30.0)), pace_s=st.floats(0.03, 0.1))
def test_where_ttlt_judges_a_ttft_and_a_pace_beside_a_ttlt_count_for_nothing(
    load: Load, ttlt_s: float, pace_s: float
) -> None:
    """On one replica: which one is asked first follows from the TTFT, too."""
    alone = {**load, "replicas": 1}
    whole, several = Slo(ttlt_s=ttlt_s), Slo(ttft_s=0.3, tbt_s=pace_s, ttlt_s=ttlt_s)
    by = Definition.TTLT
    assert met(alone, [several], by, draft=False) == met(alone, [whole], by, draft=False)


@pytest.mark.parametrize("definition", Definition)
def test_a_view_shows_the_bounds_that_count(definition: Definition) -> None:
    several = Row(slot=1, ttft_s=2.0, tbt_s=0.05, ttlt_s=60.0, definition=definition)
    by_pace = Row(slot=2, ttft_s=2.0, tbt_s=0.05, definition=definition)
    seen = view([several, by_pace, Row(slot=3, ttlt_s=60.0, definition=definition)])
    shown = as_judged(seen)
    if definition is not Definition.TTLT:
        assert shown is seen
        assert seen.whole.tolist() == [False, False, True]
        return
    for name in ("first_due_unix_s", "next_due_unix_s", "tbt_s", "tightest_tbt_s"):
        before, now = getattr(seen, name).tolist(), getattr(shown, name).tolist()
        assert now == [math.inf, before[1], math.inf]
    assert shown.last_due_unix_s.tolist() == seen.last_due_unix_s.tolist()
    assert shown.whole.tolist() == [True, False, True]


def offer(slo: Slo, prompt_tokens: int = 100) -> Offer:
    return Offer(
        key=RequestKey("a"),
        attempt=1,
        service_class=ServiceClass.STANDARD,
        tier="t",
        slo=slo,
        importance=1.0,
        application="a",
        arrived_unix_s=NOW,
        prompt_tokens=prompt_tokens,
        max_tokens=400,
        next_due_unix_s=slo.first_due_unix_s(NOW),
    )


@pytest.mark.parametrize("definition", Definition)
def test_a_request_whose_ttft_cannot_be_kept_is_declined_though_it_has_a_ttlt(
    definition: Definition,
) -> None:
    """Its prompt takes about 0.7 s alone. Where `ttlt` judges, its TTFT counts for nothing."""
    policy, slo = registry.make("slackline"), Slo(ttft_s=0.2, ttlt_s=60.0, definition=definition)
    (answer,) = policy.admit(view([]), [offer(slo, prompt_tokens=8000)])
    assert answer.accepted == (definition is Definition.TTLT)
    without = Slo(ttlt_s=60.0, definition=definition)
    (answer,) = policy.admit(view([]), [offer(without, prompt_tokens=8000)])
    assert answer.accepted


def beside_whole_answers(row: Row) -> View:
    """A decode of this row, and others whose answers are to be whole very soon."""
    hurried = [summary(slot, max_tokens=900, ttlt_s=12.0, arrived_s=-11.0) for slot in range(2, 31)]
    return view([decode(row, generated=10), *(decode(other) for other in hurried)])


def test_a_ttlt_that_gives_way_leaves_the_pace_beside_it() -> None:
    """It has a pace of 15 ms, and its TTLT asks for less; passes of all would take longer."""
    seen = beside_whole_answers(Row(slot=1, tbt_s=0.015, ttlt_s=600.0, max_tokens=900))
    due, rows = due_of_rows(seen, OutputLengths(), STEP_S), np.arange(seen.rows)
    assert seen.profile.batch_s(chunk.decodes_of(seen, rows)) < 0.015 < due.ttlt_pace_s[0]
    for waits in (True, False):
        for late in (True, False):
            paces_s = unhurried(seen, due, rows, waits=waits, late=late).pace_s
            assert paces_s[0] == 0.015
            assert (paces_s >= due.pace_s).all()


def test_a_decode_in_a_hurry_is_let_go_to_its_own_pace_at_most() -> None:
    """Its TTLT asks for faster tokens; a pace that is tighter than its TTLT is no hurry."""
    calm = [decode(summary(n, ttlt_s=60.0, max_tokens=400)) for n in range(12)]
    late = decode(Row(slot=12, tbt_s=0.05, ttlt_s=60.0, arrived_s=-55.0, max_tokens=305))
    paced = decode(Row(slot=13, tbt_s=0.015, ttlt_s=600.0, max_tokens=400))
    waiting = [Row(slot=20 + n, target=300, ttlt_s=60.0, max_tokens=20) for n in range(4)]
    seen = view([*calm, late, paced, *waiting])
    due, rows = due_of_rows(seen, OutputLengths(), STEP_S), np.arange(seen.rows)
    let_go_s = without_hurry(seen, due, rows[:14], rows[14:], prices_of(seen.profile)).pace_s
    changed = (let_go_s != due.pace_s).nonzero()[0]
    assert (changed.tolist(), let_go_s[changed].tolist()) == ([12], [0.05])


def test_early_tokens_loosen_a_pace_as_far_as_the_ttlt_allows() -> None:
    def row(slot: int, ttlt_s: float) -> Row:
        return Row(slot=slot, ttft_s=2.0, tbt_s=0.1, ttlt_s=ttlt_s, max_tokens=50)

    seen = view([decode(row(n, ttlt_s), generated=10) for n, ttlt_s in enumerate((60.0, 6.0, 1.0))])
    due = due_of_rows(seen, OutputLengths(), STEP_S)
    # token 11 is due at 3.0 s, 2.9 s later than by its pace, and 40 tokens are to come
    by_pace_s = 0.1 + 2.9 / 40
    assert due.ttlt_pace_s[0] > by_pace_s > due.ttlt_pace_s[1] > 0.1 > due.ttlt_pace_s[2]
    assert eased(seen, due).pace_s.tolist() == pytest.approx([by_pace_s, *due.ttlt_pace_s[1:]])


def test_the_crowd_counts_the_pace_and_not_what_a_ttlt_asks_for() -> None:
    several = interactive(1, ttlt_s=8.0, max_tokens=900)
    seen = view([decode(several), replaced(several, 2), summary(3)])
    lengths, prices = OutputLengths(), prices_of(seen.profile)
    due = due_of_rows(seen, lengths, 0.001)
    assert due.pace_s[0] < 0.05
    waiting = np.array([1, 2])
    present = present_of(
        seen, due, np.array([0]), waiting, work_of_rows(seen, due, waiting, prices)
    )
    assert present.pace_s[0] == 0.05
    assert present.pace_s[1] >= 0.05
    assert present.pace_s[2] == math.inf
    offers = [offer(Slo(tbt_s=0.05, ttlt_s=8.0)), offer(Slo(ttlt_s=8.0)), offer(Slo(tbt_s=0.05))]
    of_offers = due_of_offers(offers, NOW, lengths, 0.001)
    asked = asked_of(offers, work_of_offers(offers, of_offers, NOW, prices), 0.0)
    assert asked.pace_s[0] == pytest.approx(0.05, rel=0.5)
    assert asked.pace_s[1] == math.inf
    assert asked.pace_s[2] >= 0.05


def replaced(row: Row, slot: int) -> Row:
    return Row(**{**{name: getattr(row, name) for name in Row.__annotations__}, "slot": slot})
