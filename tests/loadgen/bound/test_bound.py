"""Tests of loadgen/bound, the limit on the requests that any scheduler can satisfy: no policy beats
it, and it charges no iteration more than its time (docs/bound.md).
"""

import itertools
import math
from array import array
from collections.abc import Sequence
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from loadgen.bound.charges import charges, iteration_range_s
from loadgen.bound.instance import Instance
from loadgen.bound.limit import SLIVER, bound
from loadgen.bound.relaxations import met_by_relaxation
from loadgen.bound.shares import payers, shared_steps
from loadgen.bound.strata import strata
from loadgen.bound.windows import Windows
from loadgen.bound.work import work_of
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.token_times import measured
from loadgen.simulator.traffic import Traffic
from shared.core.record.judgement import missed
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import ConfigError
from shared.measure import CLOSE_S
from shared.perf import profile_file as store
from shared.perf.forms import SolaPolynomial
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.vocabulary import Definition, Missed, Slo
from tests.loadgen import planned
from tests.loadgen.bound.schedules import (
    Schedule,
    Served,
    drawn,
    followed_by,
    haphazard,
    just_kept,
    pace_s,
    steady,
)
from tests.loadgen.planned import one as asked
from tests.rings import slow_but

QOSERVE = "a100-llama3-8b-qoserve"
LONGEST = 2048


def forms() -> dict[str, Profile]:
    """Every shipped profile, and one of each formula that none of them has."""
    # Prompts cost next to nothing, and the base dominates iterations, so that their number matters.
    flat = SolaPolynomial(a0=1e-13, b0=1e-13, c0=1e-9, d0=0.0, a1=5e-4, b1=1e-12, c1=0.0)
    sola = SolaPolynomial(a0=1e-9, b0=2e-9, c0=8e-5, d0=4e-3, a1=2e-5, b1=1e-7, c1=1e-2)
    return {name: store.load(name) for name in store.names()} | {
        "sola": sola.profile("sola", 5e-4),
        "flat": flat.profile("flat", 1e-2),
    }


FORMS = forms()
overload = partial(planned.drawn, "sharegpt")
FAST = [name for name in store.names() if name != "cpu-tiny"]


def only(slo: Slo) -> TierSet:
    return TierSet(name="x", default="b", tiers={"b": Tier(slo=slo)})


def random_requests(
    rng: Random, tiers: str, most: int, prompt: int, output: int, span_s: float
) -> list[PlannedRequest]:
    """Up to `most` requests, whose lengths spread widely around those given."""
    arrivals_s = sorted(rng.uniform(0, span_s) for _ in range(rng.randint(1, most)))

    def tokens(median: int, limit: int) -> int:
        return min(limit, max(1, int(rng.lognormvariate(0, 1) * median)))

    return [
        asked(i, tokens(prompt, 7000), tokens(output, 900), rng.choice(tiers), at_s)
        for i, at_s in enumerate(arrivals_s)
    ]


# ------------------------------------------------------------ no scheduler beats it


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    profile=st.sampled_from([*store.names(), QOSERVE, QOSERVE]),
    replicas=st.sampled_from([1, 1, 2, 3]),
    kinds=st.sampled_from(["a", "b", "ab", "abcd"]),
    lengths=st.sampled_from([(30, 2), (300, 20), (3000, 2), (3000, 60)]),
)
def test_no_policy_ever_satisfies_more_requests(
    seed: int, profile: str, replicas: int, kinds: str, lengths: tuple[int, int]
) -> None:
    rng = Random(seed)
    slower = 3.0 if "70b" in profile else 1.0
    tiers = TierSet(
        name="drawn",
        default="a",
        tiers={
            "a": Tier(
                slo=Slo(
                    ttft_s=slower * rng.uniform(0.05, 2), tbt_s=slower * rng.uniform(0.01, 0.06)
                )
            ),
            "b": Tier(slo=Slo(ttlt_s=rng.uniform(0.3, 6))),
            "c": Tier(slo=Slo(ttft_s=rng.uniform(0.3, 3), ttlt_s=rng.uniform(1, 10))),
            "d": Tier(slo=Slo(tbt_s=0.03)),
        },
    )
    requests = random_requests(rng, kinds, 30, *lengths, rng.uniform(0.1, 4))
    at_most = {
        definition: bound(requests, tiers.judged_by(definition), profile, replicas).met_fraction
        for definition in Definition
    }
    policy = rng.choice(registry.names())
    result = simulate(
        Traffic(requests, tiers, seed),
        Deployment(policy, profile, replicas, draft=0.0),
        RunOptions(keep_times=True),
    )
    for definition in Definition:
        met = met_fraction(definition, requests, result)
        assert met <= at_most[definition] + 1e-9, f"{policy} met {met} by {definition}"


def met_fraction(
    definition: Definition, requests: Sequence[PlannedRequest], result: SimulationResult
) -> float:
    """The fraction of these requests that this definition would find met."""
    assert result.token_unix_s is not None
    met = 0
    for request, verdict, slo, times in zip(
        requests, result.verdicts, result.slos, result.token_unix_s, strict=True
    ):
        judged = structs.replace(slo, definition=definition)
        measure = measured(array("d", times), judged, request.arrival_s)
        good = verdict is not None and verdict.finish_reason in GOOD_ENDS
        met += good and missed(measure, judged, request.arrival_s) is Missed.NOTHING
    return met / len(requests)


@pytest.mark.parametrize("policy", slow_but(["slos_serve", "edf"], registry.names()))
def test_every_policy_stays_below_it_under_overload(policy: str) -> None:
    requests = overload(12.0, 10.0, 3)
    result = simulate(Traffic(requests, DEMO_3), Deployment(policy, QOSERVE, draft=0.0))
    assert result.met_fraction <= bound(requests, DEMO_3, QOSERVE, 1).met_fraction


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_it_is_not_below_the_best_order_of_a_few_prompts(seed: int) -> None:
    """Brute force: every subset in every order, each prompt in one iteration of its own, as early
    as it may.
    """
    rng = Random(seed)
    tiers = TierSet(
        name="few",
        default="b",
        tiers={name: Tier(slo=Slo(ttlt_s=rng.uniform(0.1, 1.0))) for name in "bc"},
    )
    requests = random_requests(rng, "bc", 5, 3000, 1, 0.5)
    requests = [r._replace(output_tokens=1) for r in requests]
    profile, best = store.load(QOSERVE), 0
    for order in itertools.permutations(requests):
        now_s, met = 0.0, 0
        for r in order:
            took_s = profile.batch_s(BatchShape().with_chunk(r.prompt_tokens, 0))
            ttlt_s = tiers.named(r.tier).slo.ttlt_s
            assert ttlt_s is not None
            ended_s = max(now_s, r.arrival_s) + took_s
            if ended_s <= r.arrival_s + ttlt_s:
                now_s, met = ended_s, met + 1
        best = max(best, met)
    found = bound(requests, tiers, QOSERVE, 1)
    assert best / len(requests) <= found.met_fraction + 1e-9


# ------------------------------------------------------------ what was served is possible

# prompt and output tokens
KINDS = [(30, 40), (300, 30), (1500, 3), (100, 200), (400, 100), (1000, 60), (20, 1)]
PACE = ("ttft_s", "tbt_s")
BOUNDS = [PACE, ("ttlt_s",), (*PACE, "ttlt_s"), ("ttft_s",)]


def excluded_by(
    schedule: Schedule,
    requests: list[PlannedRequest],
    tiers: TierSet,
    definition: Definition = Definition.DEADLINE,
) -> dict[str, int]:
    """The number of requests that each relaxation excludes."""
    judged = tiers.judged_by(definition)
    instance = Instance(requests, judged, schedule.profile, schedule.kv_tokens, schedule.replicas)
    return {
        relaxation: len(requests) - math.floor(met + SLIVER)
        for relaxation, met in met_by_relaxation(instance).items()
    }


@pytest.mark.slow
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from([*sorted(FORMS), "flat", "flat"]),
    kind=st.sampled_from(KINDS),
    style=st.sampled_from(["lock-step", "steady", "waiting", "haphazard", "haphazard on two"]),
    bounds=st.lists(st.sampled_from(BOUNDS), min_size=1, max_size=20),
    common=st.booleans(),
    definition=st.sampled_from(Definition),
)
def test_it_excludes_no_request_of_a_schedule_that_serves_all(
    seed: int,
    name: str,
    kind: tuple[int, int],
    style: str,
    bounds: list[tuple[str, ...]],
    common: bool,
    definition: Definition,
) -> None:
    """The SLOs are just as tight as the latencies that the requests had, the KV just as large as
    the KV that was held.
    """
    rng = Random(seed)
    count = rng.choice([5, 20, 50])
    queue = drawn(rng, count, *kind, spread=rng.choice([0.0, 0.1, 0.7]))
    if "haphazard" in style:
        schedule = haphazard(
            rng,
            FORMS[name],
            [queue] if style == "haphazard" else [queue, drawn(rng, count, *kind, spread=0.5)],
        )
    else:
        schedule = steady(
            FORMS[name],
            queue,
            count if style == "lock-step" else -(-count // 4),
            waits=style == "waiting",
        )
    excluded = excluded_by(
        schedule, *just_kept(schedule, definition, bounds, common=common), definition
    )
    assert excluded == dict.fromkeys(excluded, 0)


@pytest.mark.slow
@pytest.mark.parametrize("part", [1.0, 0.9])
def test_it_excludes_requests_if_lock_step_must_be_a_tenth_quicker_and_otherwise_none(
    part: float,
) -> None:
    """Nothing is quicker than lock-step, except to run fewer iterations or to leave a request out:
    so the check above can fail.
    """
    seeds, excluding = range(24), dict.fromkeys(["work", "memory", "pace"], 0)
    for seed in seeds:
        rng = Random(seed)
        name, streams, kind = (
            rng.choice([*FAST, "flat", "flat"]),
            rng.choice([8, 32, 64]),
            rng.choice([(50, 50), (500, 100), (1500, 60)]),
        )
        schedule = steady(
            FORMS[name], drawn(rng, streams, *kind, spread=rng.choice([0.0, 0.1])), streams
        )
        excluded = excluded_by(
            schedule,
            *just_kept(schedule, Definition.DEADLINE, [PACE], common=rng.random() < 0.5, part=part),
        )
        for relaxation in excluding:
            excluding[relaxation] += excluded.get(relaxation, 0) > 0
    if part == 1:
        assert excluding == dict.fromkeys(excluding, 0)
    else:
        assert min(excluding.values()) >= len(seeds) / 4, excluding


@pytest.mark.parametrize("hurried", [0, 20])
@pytest.mark.parametrize("in_time", [5, 8])
def test_behind_a_full_kv_it_admits_the_requests_served_in_time_and_hardly_more(
    hurried: int, in_time: int
) -> None:
    """Iterations cost little beyond their fixed cost, so that only the KV keeps the queue from
    being served at once.

    The queue is served in ten cohorts that fill the KV, so many of them in time. The hurried
    requests have ended before the queue arrives.
    """
    profile = SolaPolynomial(
        a0=1e-13, b0=1e-13, c0=1e-6, d0=0.0, a1=1e-6, b1=1e-12, c1=0.0
    ).profile("once", 1e-2)
    schedule = steady(profile, [Served(1000, 50) for _ in range(320)], 32, waits=True)
    patient = Slo(ttlt_s=schedule.served[32 * in_time - 1].token_at_s[-1])
    if hurried:
        schedule = followed_by(
            steady(profile, [Served(20, 50) for _ in range(hurried)], hurried), schedule
        )
    first = schedule.served[0]
    tiers = {
        "p": Tier(slo=patient),
        "h": Tier(slo=Slo(ttft_s=first.token_at_s[0], tbt_s=pace_s(first, Definition.DEADLINE))),
    }
    requests = [
        asked(i, one.prompt_tokens, one.output_tokens, "p" if i >= hurried else "h", one.arrival_s)
        for i, one in enumerate(schedule.served)
    ]
    excluded = excluded_by(schedule, requests, TierSet(name="two", default="p", tiers=tiers))
    assert excluded["work"] == 0
    for relaxation in ("memory", "pace") if hurried else ("memory",):
        assert 32 * in_time <= 320 - excluded[relaxation] <= 1.08 * 32 * in_time


# ------------------------------------------------------------ its foundations


@given(
    definition=st.sampled_from([Definition.MEAN_TPOT, Definition.MAX_TPOT_10]),
    output=st.sampled_from([2, 10, 11, 12, 1001, 5003, 120_000]),
    ttft_s=st.floats(0.01, 100),
    gap_s=st.floats(1e-3, 1.0),
    bunch=st.sampled_from([1, 5, 10]),
)
def test_a_token_that_a_mean_tolerates_is_in_time_however_long_the_output(
    definition: Definition, output: int, ttft_s: float, gap_s: float, bunch: int
) -> None:
    """Each mean exceeds its bound by nearly the nanosecond of tolerance. Tokens come in bunches, at
    the end of each bunch.
    """
    after = np.arange(output)
    after = (
        np.minimum(-(-after // bunch) * bunch, output - 1)
        if definition is Definition.MAX_TPOT_10
        else after
    )
    token_at_s = ttft_s + after * gap_s
    slo = Slo(ttft_s=ttft_s, tbt_s=gap_s - 0.9 * CLOSE_S, definition=definition)
    measure = measured(array("d", token_at_s.tolist()), slo, 0.0)
    assert missed(measure, slo, 0.0) is Missed.NOTHING
    work = work_of([asked(0, 10, output)], only(slo), store.load(QOSERVE), 400_000, np.zeros(11))
    due_s = np.minimum(work.step_due_s + np.arange(1, output) * work.pace_s, work.due_s)
    assert np.all(token_at_s[1:] <= due_s)


@pytest.mark.parametrize("name", FORMS)
@given(seed=st.integers(0, 10**6))
def test_no_iteration_is_charged_more_than_it_takes(name: str, seed: int) -> None:
    rng, profile = Random(seed), FORMS[name]
    chunks = [
        (rng.randint(1, 1200), rng.choice([0, 0, rng.randint(0, 800)]))
        for _ in range(rng.choice([0, 1, 1, 2, 5]))
    ]
    contexts = [
        rng.randint(1, rng.choice([20, 400, LONGEST]))
        for _ in range(rng.choice([0, 1, 3, 40, 200]))
    ]
    shape = BatchShape(decodes=len(contexts), decode_context=sum(contexts))
    for new, cached in chunks:
        shape = shape.with_chunk(new, cached)
    least_s, most_s = iteration_range_s(strata(profile))
    for part in (0.0, 0.3, 1.0):
        of = charges(strata(profile), least_s + part * (most_s - least_s), LONGEST)
        # Chunks alone must pay it as well: the last chunk of a context computed anew gives a token.
        charged_s = of.iteration_s if shape.tokens else 0.0
        # A chunk adds to the least price of its prompt at most its own price.
        charged_s += sum(
            float(of.prompt_s[cached + new] - of.prompt_s[cached]) for new, cached in chunks
        )
        steps_s = np.diff(of.decodes_s - of.credit_s)
        charged_s += sum(float(steps_s[context - 1]) for context in contexts)
        assert charged_s <= profile.batch_s(shape) * (1 + 1e-9)


@given(seed=st.integers(0, 10**6))
def test_the_shares_of_an_instant_never_sum_to_more_than_one(seed: int) -> None:
    """All payments for steps together are at most one share for as many steps as the quickest pace
    has in all that time.
    """
    rng = Random(seed)
    slo = Slo(ttft_s=rng.uniform(0.2, 2), tbt_s=rng.uniform(0.02, 0.1))
    requests = random_requests(rng, "b", 40, 300, 60, 6.0)
    work = work_of(requests, only(slo), store.load(QOSERVE), 400_000, np.zeros(8193))
    paid = shared_steps(work, payers(work), np.full(len(requests), 1e9))
    assert slo.tbt_s is not None
    assert np.all(paid >= 0)
    assert np.all(paid <= work.steps + 1e-9)
    # Deadlines of one request are tbt_s apart, so that a second of full share is worth 1 / tbt_s
    # steps, and one step more per request.
    whole_s = float(work.due_s.max() - work.steps_from_s.min())
    assert paid.sum() <= whole_s / slo.tbt_s + len(requests) + 1


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(-3, 20)), min_size=1, max_size=12),
    st.integers(0, 10**6),
)
def test_windows_agree_with_slices(drawn: list[tuple[int, int]], seed: int) -> None:
    values = np.random.default_rng(seed).random(24)
    first = np.array([f for f, _ in drawn])
    last = np.array([min(23, f + more) for f, more in drawn])
    windows, amounts = Windows(first, last, 24), np.random.default_rng(seed + 1).random(len(drawn))
    slices = [values[f : e + 1] if e >= f else values[:0] for f, e in zip(first, last, strict=True)]
    assert windows.least(values).tolist() == [float(s.min(initial=math.inf)) for s in slices]
    assert windows.sum(values) == pytest.approx([float(s.sum()) for s in slices])
    spread = [
        sum(a for a, f, e in zip(amounts, first, last, strict=True) if f <= c <= e)
        for c in range(24)
    ]
    assert windows.spread(amounts) == pytest.approx(spread)


# ------------------------------------------------------------ the figures of the bound


def test_it_is_informative_under_overload_and_the_pace_is_what_makes_it_so() -> None:
    found = bound(overload(6.0, 120.0), DEMO_3, QOSERVE, 1)
    assert found.met_fraction < 0.85
    assert found.by == "pace"
    assert found.met_by["pace"] < found.met_by["work"] < found.met_by["alone"] == 1.0
    assert found.violated_fraction == 1 - found.met_fraction


def test_more_load_lowers_it_and_more_replicas_raise_it() -> None:
    by_rate = [
        bound(overload(rate, 30.0), DEMO_3, QOSERVE, 1).met_fraction for rate in (1.0, 10.0, 20.0)
    ]
    assert by_rate[0] == 1.0 > by_rate[1] > by_rate[2]
    by_replicas = [bound(overload(20.0, 30.0), DEMO_3, QOSERVE, n).met_fraction for n in (1, 2, 12)]
    assert by_replicas[0] < by_replicas[1] < by_replicas[2] == 1.0


def test_a_prompt_of_exactly_the_kv_may_be_met_and_a_larger_one_not() -> None:
    tiers = only(Slo(ttlt_s=100.0))
    for tokens, met in ((2048, 1.0), (2049, 0.0)):
        request = asked(0, tokens, 1)
        instance = Instance([request], tiers, store.load(QOSERVE), 2048, 1)
        assert met_by_relaxation(instance)["alone"] == met


def test_a_request_that_is_late_even_alone_is_not_counted() -> None:
    tiers = only(Slo(ttlt_s=0.2))
    found = bound([asked(0, 200, 1), asked(1, 6000, 1, at_s=10.0)], tiers, QOSERVE, 4)
    assert (found.met_fraction, found.by) == (0.5, "alone")


def test_a_request_that_is_never_due_or_never_arrives_is_met() -> None:
    tiers = TierSet(name="paced", default="d", tiers={"d": Tier(slo=Slo(tbt_s=0.001))})
    assert bound([asked(0, 100, 50, "d")], tiers, QOSERVE, 1).met_fraction == 1.0
    assert bound([], tiers, QOSERVE, 1).met_fraction == 1.0


def met_alone(slo: Slo) -> float:
    return bound([asked(0, 100, 10)], only(slo), QOSERVE, 1).met_fraction


def test_a_ttft_in_multiples_counts_others_exclude_none_and_unknown_tiers_are_refused() -> None:
    assert met_alone(Slo(ttft_x=1.0)) == 1.0, "what it takes alone it can take"
    assert met_alone(Slo(ttft_x=0.01)) == 0.0
    assert met_alone(Slo(tbt_x=0.01, ttlt_x=0.01)) == 1.0
    assert met_alone(Slo(ttft_x=3.0, ttft_s=0.001)) == 0.0
    with pytest.raises(ConfigError, match="none named b"):
        bound(overload(1.0, 10.0), only(Slo(ttlt_s=1)), QOSERVE, 1)


@pytest.mark.parametrize(
    "slo", [Slo(ttft_s=0.005, tbt_x=100), Slo(ttft_s=0.05, tbt_s=0.005, ttlt_x=50)]
)
def test_by_ttlt_a_bound_in_multiples_takes_the_place_of_the_others(slo: Slo) -> None:
    """By the other definitions the bounds in seconds still hold: no request has a first token in 5
    ms, or a token every 5 ms.
    """
    request, tiers = asked(0, 400, 50), only(slo)
    by_ttlt = tiers.judged_by(Definition.TTLT)
    result = simulate(Traffic([request], by_ttlt), Deployment("fcfs", QOSERVE))
    assert result.met_fraction == 1.0
    assert {
        definition: bound([request], tiers.judged_by(definition), QOSERVE, 1).met_fraction
        for definition in Definition
    } == {definition: float(definition is Definition.TTLT) for definition in Definition}
