"""Tests of the policy slackline by SLOs of TTFT, pace and TTLT: it holds each that counts."""

import math
from collections.abc import Sequence
from dataclasses import replace as replaced

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
from shared.policy.seam import Ended, View
from shared.policy.slackline import bounds
from shared.policy.slackline.bounds import MARGIN_S, SHARE, Decodes, Learned, Prefills, as_judged
from shared.policy.slackline.prices import prices_of
from shared.policy.slackline.windows import Windows
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


def learned_of(seen: View, lengths: OutputLengths, step_s: float = STEP_S) -> Learned:
    return Learned(lengths, step_s, prices_of(seen.profile), scale=1.0)


def decodes_of(*rows: Row, step_s: float = STEP_S, waits: bool = False) -> Decodes:
    seen = view([decode(row, generated=10) for row in rows])
    every = np.arange(len(rows))
    facts = bounds.facts_of(seen, every, learned_of(seen, OutputLengths(), step_s))
    return bounds.decodes_of(seen, every, facts, step_s, Windows(), waits=waits)


def prefills_of(*rows: Row, lengths: OutputLengths, step_s: float = STEP_S) -> Prefills:
    seen = view(rows)
    seen.applications = ("",)
    every, learned = np.arange(len(rows)), learned_of(seen, lengths, step_s)
    facts = bounds.facts_of(seen, every, learned)
    return bounds.prefills_of(every, facts, learned, seen.block_tokens)


def test_a_prefill_is_due_at_its_ttft_and_early_enough_for_the_output_before_a_ttlt() -> None:
    """The mean of outputs, 400 tokens at the speed of lately, decides whether there is hope."""
    lengths = OutputLengths()
    for _ in range(10):
        lengths.observe(Ended("", 100, 500, 400))
    rows = (Row(slot=1, ttlt_s=20.0), interactive(2, ttft_s=6.0), Row(slot=3, tbt_s=0.1))
    asks = prefills_of(*rows, lengths=lengths)
    assert asks.due_s.tolist() == pytest.approx([20.0 - 400 * 1.2 * 0.02, 6.0, AN_HOUR_S])
    assert asks.hope_s[:2].tolist() == pytest.approx([20.0 - 400 * 0.02, 6.0])
    assert asks.waits.tolist() == [True, False, False]
    # a long output would take all of this TTLT; the prefill has a third of it
    (due_s,) = prefills_of(Row(slot=1, ttlt_s=10.0), lengths=OutputLengths(), step_s=0.05).due_s
    assert due_s == pytest.approx(0.35 * 10.0)


def test_a_request_that_thinks_has_the_tightest_pace_of_the_stages_to_come() -> None:
    """Thinking may end with any token. So its prefill is weighed by the tighter pace."""
    slo = Slo(ttft_s=6.0, thinking_tbt_s=0.2, tbt_s=0.05)
    thinking = interactive(1, tbt_s=0.2, later_tbt_s=0.05, thinking=True)
    assert prefills_of(thinking, lengths=OutputLengths()).pace_s.tolist() == [0.05]
    seen, none = view([]), np.zeros(0, dtype=np.intp)
    facts = bounds.facts_of(seen, none, learned_of(seen, OutputLengths()), [offer(slo)])
    assert facts.tbt_s.tolist() == [0.05]


@pytest.mark.parametrize("definition", Definition)
def test_early_tokens_put_off_the_next_one_as_the_definition_allows(definition: Definition) -> None:
    row = Row(slot=1, arrived_s=-1.0, ttft_s=2.0, tbt_s=0.1, definition=definition, max_tokens=50)
    found = decodes_of(row)  # ten tokens, the first of which came a second ago
    earns = definition in (Definition.DEADLINE, Definition.TTLT)
    # the deadline is twelve paces after the TTFT, in two seconds: 1.9 are spread over 40 tokens
    assert found.pace_s[0] == pytest.approx(0.1 + (1.9 / 40 if earns else 0.0))
    assert found.deadline_s[0] == pytest.approx(2.0 if earns else found.even_s[0])


@pytest.mark.parametrize("waits", [True, False])
def test_a_ttlt_makes_passes_take_no_more_than_a_share_of_the_time_while_a_prefill_waits(
    waits: bool,
) -> None:
    hurried = [summary(n, max_tokens=900, ttlt_s=100.0, arrived_s=-99.0) for n in range(20)]
    rows = [*hurried, Row(slot=20, tbt_s=0.012, ttlt_s=600.0, max_tokens=900)]
    found = decodes_of(*rows, step_s=0.001, waits=waits)
    seen = view([decode(row, generated=10) for row in rows])
    pass_s = seen.profile.batch_s(chunk.decodes_of(seen, np.arange(21)))
    least_s = pass_s / (SHARE if waits else 1.0) + 2 * MARGIN_S
    assert found.asked_s[0] < pass_s
    assert found.pace_s[:20].tolist() == pytest.approx([least_s] * 20)
    assert found.pace_s[20] == 0.012  # a pace of the SLO stays


@pytest.mark.parametrize("definition", [d for d in Definition if d is not Definition.TTLT])
def test_a_ttlt_beside_a_pace_makes_tokens_come_faster(definition: Definition) -> None:
    """Two seconds are left for up to 40 tokens."""
    row = Row(slot=1, arrived_s=-1.0, tbt_s=0.1, ttlt_s=3.0, definition=definition, max_tokens=50)
    found, slow = decodes_of(row), decodes_of(replaced(row, ttlt_s=60.0))
    assert found.pace_s[0] == found.asked_s[0] < 2.0 / 40
    newest_s = view([decode(row, generated=10)]).newest_token_unix_s[0] - NOW
    soon_s = min(newest_s + found.pace_s[0], slow.even_s[0])
    for due_s in (found.even_s, found.until_s, found.deadline_s):
        assert due_s[0] == pytest.approx(soon_s)


def test_where_every_gap_counts_early_tokens_earn_nothing() -> None:
    """Ten tokens that came early make the next one due later, but by this definition."""
    row = Row(slot=1, tbt_s=0.1, definition=Definition.MEAN_TPOT)
    gaps = replaced(row, definition=Definition.EVERY_GAP)
    newest_s = view([decode(row, generated=10)]).newest_token_unix_s[0] - NOW
    assert decodes_of(gaps).until_s.tolist() == pytest.approx([newest_s + 0.1])
    assert decodes_of(row).until_s[0] > newest_s + 0.1


def test_a_whole_answer_that_is_late_is_best_effort_from_then_on() -> None:
    rows = [
        decode(summary(n, ttlt_s=10.0, arrived_s=arrived_s), generated=10)
        for n, arrived_s in ((1, -11.0), (2, -9.0))
    ]
    (choice,) = registry.make("slackline").plan(view(rows))
    assert list(choice.relegate) == [1]
