"""`slackline` finds by what it sees where drafts begin to lose, whatever was announced."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, ReplicaFacts
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.draft import Draft
from shared.perf.profile_file import load
from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.policy.seam import Drafts, Observation
from shared.policy.slackline.drafting.lasting import APART, Lasting
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.rings import slow_but
from tests.shared.policy.flat_profile import flat_profile
from tests.shared.policy.views import Linear, Row, decode, view

TOKENS = {1: 2000, 8: 1000, 32: 800}  # of each answer, by the number of requests
PATIENT_S, TIGHT_S = 0.4, 0.012  # TBT; at 8 ms drafts may lose 9 %


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pass of 32 decodes takes 2.3 times one of a single decode, about as with the shipped model
    on one CPU thread.
    """
    return flat_profile(tmp_path_factory.mktemp("profile"), batch_s=0.0029, token_s=1.15e-4)


def served(
    profile: str,
    requests: int,
    *,
    step: float,
    times: float,
    tbt_s: float,
    drafts: bool = True,
    acceptance: float = ACCEPTANCE,
) -> SimulationResult:
    """So many requests that all begin at once and decode together. A verified draft takes `times`
    what the profile says.
    """
    slo = Slo(ttft_s=5.0, tbt_s=tbt_s, definition=Definition.MEAN_TPOT)
    tiers = TierSet(name="one", default="one", tiers={"one": Tier(slo=slo)})
    plan = [
        PlannedRequest(n, 0.0, 20, TOKENS[requests], "one", 1.0, "default", "question")
        for n in range(requests)
    ]
    deployment = Deployment(
        "slackline",
        profile,
        1,
        {} if drafts else {"without": "drafts"},
        Latency.live(),
        ReplicaFacts(kv_blocks=8192, context_tokens=4096),
        draft=(step, 0.18),
        verification_times=times,
        acceptance=acceptance,
    )
    return simulate(Traffic(plan, tiers, 1), deployment)


@pytest.mark.parametrize("tbt_s", [PATIENT_S, TIGHT_S])
def test_drafts_that_are_dearer_than_announced_end_where_they_lose(
    profile: str, tbt_s: float
) -> None:
    dear = served(profile, 32, step=0.15, times=2.5, tbt_s=tbt_s)
    plain = served(profile, 32, step=0.15, times=2.5, tbt_s=tbt_s, drafts=False)
    # they cost a sixth of the speed if all draft
    assert dear.verifications < 32 * 0.05 * dear.iterations
    assert dear.simulated_s < 1.04 * plain.simulated_s


@pytest.mark.parametrize("tbt_s", [PATIENT_S, TIGHT_S])
@pytest.mark.parametrize(("requests", "least"), slow_but([(8, 1.02)], [(1, 1.3), (8, 1.02)]))
def test_drafts_go_on_where_they_gain_even_if_they_are_dearer(
    profile: str, requests: int, least: float, tbt_s: float
) -> None:
    dear = served(profile, requests, step=0.15, times=2.5, tbt_s=tbt_s)
    plain = served(profile, requests, step=0.15, times=2.5, tbt_s=tbt_s, drafts=False)
    assert plain.simulated_s / dear.simulated_s > least


@pytest.mark.parametrize("tbt_s", [PATIENT_S, TIGHT_S])
@pytest.mark.parametrize("requests", slow_but([8], [1, 8, 32]))
def test_drafts_of_which_few_are_accepted_end(profile: str, requests: int, tbt_s: float) -> None:
    wrong = served(profile, requests, step=0.15, times=1.0, tbt_s=tbt_s, acceptance=0.05)
    plain = served(profile, requests, step=0.15, times=1.0, tbt_s=tbt_s, drafts=False)
    # the first iterations, which find that out, are most of these
    assert wrong.verifications < requests * 0.06 * wrong.iterations
    assert wrong.simulated_s < 1.05 * plain.simulated_s


def test_a_tight_pace_is_no_reason_for_drafts_that_lose(
    profile: str,
) -> None:
    losing = served(profile, 32, step=0.5, times=1.0, tbt_s=TIGHT_S)
    plain = served(profile, 32, step=0.5, times=1.0, tbt_s=TIGHT_S, drafts=False)
    # the last request is alone for a while, and gains by them
    assert losing.verifications < 32
    assert losing.simulated_s < 1.001 * plain.simulated_s


@pytest.mark.slow
@settings(deadline=None, max_examples=8)
@given(
    st.sampled_from([8, 32]),
    st.floats(0.05, 0.5),
    st.floats(0.5, 4.0),
    st.sampled_from([PATIENT_S, TIGHT_S]),
)
def test_drafts_never_cost_more_than_their_trials(
    profile: str, requests: int, step: float, times: float, tbt_s: float
) -> None:
    whole = served(profile, requests, step=step, times=times, tbt_s=tbt_s)
    plain = served(profile, requests, step=step, times=times, tbt_s=tbt_s, drafts=False)
    assert whole.simulated_s < 1.06 * plain.simulated_s


# ---------------------------------------------------------------- how many are accepted

LONG, SPELL = 2000, 1000  # iterations


@pytest.mark.parametrize("requests", [1, 4, 8, 32])
def test_drafts_come_back_after_a_spell_in_which_few_were_accepted(
    profile: str, requests: int
) -> None:
    policy = registry.make("slackline")
    measured = load(profile)
    seen = view([decode(Row(slot=n, tbt_s=PATIENT_S)) for n in range(requests)], profile=measured)
    seen.draft = Draft(measured, 0.15, 0.15)
    seen.draft_tokens = seen.computed_tokens
    shape = BatchShape(decodes=requests, decode_context=100 * requests)

    def drafted(accepted: int) -> bool:
        """One iteration, of whose drafts so many of each request are accepted."""
        speculation = policy.plan(seen)[0].speculation
        if speculation is None:
            policy.observe(Observation(0.0, shape, 0.01, 0.01))
            return False
        each = np.ones(requests, dtype=np.int32)
        verified = each * max(speculation.budget_tokens // requests - 1, 1)
        drafts = Drafts(PATIENT_S * each, each - 1, verified, np.minimum(verified, accepted))
        policy.observe(Observation(0.0, shape, 0.01, 0.01, drafts=drafts))
        return True

    assert all(drafted(8) for _ in range(20))
    spell = [drafted(0) for _ in range(SPELL)]
    # they are tried now and then, the more rarely the more a trial of so many costs
    assert sum(spell[SPELL // 2 :]) < 0.25 * SPELL // 2
    after = [drafted(8) for _ in range(LONG)]
    assert all(after[LONG // 2 :])


# ---------------------------------------------------------------- what is known by size


def seen(decodes: int, took: float, *, drafts: bool, iterations: int = 1) -> Observation:
    one = np.ones(1, dtype=np.int32)
    drafted = Drafts(one * 0.1, one, one, one) if drafts else None
    shape = BatchShape(decodes=decodes, decode_context=100 * decodes)
    return Observation(0.0, shape, 0.010, 0.010 * took, drafts=drafted, iterations=iterations)


def referred(plain_s: float = 0.01) -> Lasting:
    lasting = Lasting()
    lasting.refer(20, 0.012, plain_s)
    lasting.refer(2, 0.004, 0.003)
    return lasting


def test_what_lasts_as_predicted_changes_nothing() -> None:
    lasting = referred()
    for n in range(200):
        lasting.observe(seen(20, 1.0, drafts=n % 3 > 0))
        assert lasting.factor(20) == 1.0
        assert lasting.doubt(20) == 1.0


def test_each_size_is_known_for_itself() -> None:
    lasting = referred()
    for _ in range(100):
        lasting.observe(seen(20, 1.3, drafts=True))
    assert lasting.factor(20) == pytest.approx(1.3, rel=0.02)
    assert lasting.factor(2) == 1.0


def test_what_the_profile_has_learned_since_is_not_counted_twice() -> None:
    lasting = referred()
    for _ in range(100):
        lasting.observe(seen(20, 1.3, drafts=True))
    lasting.refer(20, 1.3 * 0.012, 0.01)
    assert lasting.factor(20) == pytest.approx(1.0, rel=0.02)


def test_drafts_that_lost_are_forgotten_without_any() -> None:
    lasting = referred()
    for _ in range(100):
        lasting.observe(seen(20, 1.5, drafts=True))
    factors = [lasting.factor(20)]
    for _ in range(20):
        lasting.observe(seen(20, 1.0, drafts=False, iterations=50))
        factors.append(lasting.factor(20))
    assert factors == sorted(factors, reverse=True)
    assert factors[1] > 1.4
    assert factors[-1] < 1.1


def test_a_prediction_of_plain_iterations_that_grows_without_any_is_in_doubt() -> None:
    lasting = referred()
    lasting.refer(20, 0.014, 0.012)
    for _ in range(APART):
        assert lasting.doubt(20) == 1.0
        lasting.observe(seen(20, 1.3, drafts=True))
    assert lasting.doubt(20) == pytest.approx(1.2)
    assert lasting.doubt(2) == 1.0
    lasting.observe(seen(20, 0.8, drafts=False))
    assert lasting.doubt(20) == pytest.approx(1.2)  # right after drafts
    lasting.observe(seen(20, 0.8, drafts=False))
    assert lasting.doubt(20) == 1.0


def test_the_time_that_a_pass_loses_after_drafts_is_theirs() -> None:
    lasting = referred()
    for n in range(300):
        drafts = n % 3 == 0
        lasting.observe(seen(20, 1.15 if n % 3 == 1 else 1.0, drafts=drafts))
    assert lasting.factor(20) == 1.0


def test_few_drafts_among_many_decodes_do_not_keep_the_draft_model_at_work() -> None:
    def drafts(unread: int) -> bool:
        """There is no time to read the contexts of so many of 32 tight decodes."""
        rows = [decode(Row(slot=n, tbt_s=0.0115), context=2000) for n in range(32)]
        seen = view(rows, free=20_000)
        seen.draft = Draft(Linear(), 0.2, 0.2)
        seen.draft_tokens = seen.computed_tokens * (np.arange(32) >= unread)
        return registry.make("slackline").plan(seen)[0].speculation is not None

    assert drafts(0)
    assert not drafts(31)


def test_best_effort_requests_draft_while_they_have_the_replica_for_themselves() -> None:
    late = Row(tbt_s=0.05, best_effort=True)
    decodes = [decode(replace(late, slot=n)) for n in range(4)]

    def drafts(*others: Row) -> bool:
        seen = view([*decodes, *others])
        seen.draft = Draft(Linear(), 0.1, 0.1)
        seen.draft_tokens = seen.computed_tokens
        choice = registry.make("slackline").plan(seen)[0]
        assert set(range(4)) <= set(choice.slots.tolist())
        depth = choice.speculation.depth.tolist() if choice.speculation else []
        return any(
            deep > 0 for slot, deep in zip(choice.slots.tolist(), depth, strict=False) if slot < 4
        )

    assert drafts()
    assert not drafts(replace(late, slot=4))  # its prompt waits
    # they have a token each in the time that this one leaves, which may draft itself
    assert not drafts(decode(Row(slot=4, tbt_s=0.05)))


def test_best_effort_requests_that_do_not_draft_now_are_asked_again() -> None:
    seen = view([decode(Row(slot=n, tbt_s=0.02, best_effort=True), context=3000) for n in range(4)])
    seen.draft = Draft(Linear(), 0.1, 0.1)  # there is no time to read their contexts
    choice = registry.make("slackline").plan(seen)[0]
    assert choice.speculation is None
    assert choice.repeats == 1


@pytest.mark.parametrize(("looser_s", "drafts"), [(0.1, False), (0.012, True)])
def test_while_prompts_wait_those_draft_nothing_whose_pace_the_iteration_keeps_anyway(
    looser_s: float, drafts: bool
) -> None:
    """Drafts for all take longer than the tightest pace allows, and bring more than none."""
    tight = [decode(Row(slot=n, tbt_s=0.0045)) for n in range(2)]
    looser = [decode(Row(slot=n, tbt_s=looser_s)) for n in range(2, 10)]
    seen = view([*tight, *looser, Row(slot=10, ttlt_s=60.0)])
    seen.draft = Draft(Linear(), 0.1, 0.1)
    seen.draft_tokens = seen.computed_tokens
    choice = registry.make("slackline").plan(seen)[0]
    assert choice.speculation is not None
    depth = dict(zip(choice.slots.tolist(), choice.speculation.depth.tolist(), strict=True))
    assert all(depth[slot] > 0 for slot in range(2))
    assert [depth[slot] > 0 for slot in range(2, 10)] == [drafts] * 8


@pytest.mark.parametrize(("pace_s", "drafts"), [(0.01, False), (0.1, True)])
def test_best_effort_requests_alone_draft_no_longer_than_an_arrival_may_wait(
    pace_s: float, drafts: bool
) -> None:
    """Drafts for so many bring more than none, and take longer than two passes of one decode."""
    rows = [decode(Row(slot=n, tbt_s=pace_s, best_effort=True)) for n in range(100)]
    seen = view(rows)
    seen.draft = Draft(Linear(), 0.1, 0.1)
    seen.draft_tokens = seen.computed_tokens
    choice = registry.make("slackline").plan(seen)[0]
    assert (choice.speculation is not None) == drafts
