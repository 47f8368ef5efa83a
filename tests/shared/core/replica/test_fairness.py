"""Tests of fairness on a replica: a flood from one tenant does not take the share of another."""

from collections.abc import Iterable, Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.core.replica.fairness import CREDIT_TOKENS, Fairness
from shared.core.replica.request_table import RequestTable
from shared.rules.tiers import DEFAULT
from shared.schemas import Offer
from tests import made

SEED = 1


def offer(tenant: str, number: int, *, tokens: int = 1000, **more: float) -> Offer:
    return made.offer(
        f"{tenant}.{number}",
        application="chat",
        prompt_tokens=tokens,
        **{"importance": 1.0, **more},
    )


class Replica:
    """The request table and fairness, as the core uses them."""

    def __init__(self, slots: int = 2000) -> None:
        self.table = RequestTable(
            slots=slots, kv_blocks=10**6, block_tokens=16, context_tokens=10**6
        )
        self.fairness = Fairness()

    def take(self, offers: Iterable[Offer], now_unix_s: float = 0.0) -> None:
        for each in offers:
            slot = self.table.used
            self.fairness.enter(each, self.table, now_unix_s)
            self.table.add(slot, each)
            self.fairness.seat(slot, self.table, now_unix_s)

    def seen(self) -> dict[str, list[float]]:
        """The importances that a policy sees, by tenant, in the order of the requests."""
        shown, _ = self.fairness.importance(self.table, ())
        seen: dict[str, list[float]] = {}
        for slot in sorted(self.table.offers):
            tenant = self.table.offers[slot].key.partition(".")[0]
            seen.setdefault(tenant, []).append(float(shown[self.table.row_of[slot]]))
        return seen


def test_only_requests_of_equal_importance_compete() -> None:
    replica = Replica()
    replica.take(offer("a", n, importance=2.0) for n in range(300))
    replica.take(offer("b", n) for n in range(300))
    assert {tenant: set(seen) for tenant, seen in replica.seen().items()} == {
        "a": {2.0},
        "b": {1.0},
    }


@given(away_tokens=st.integers(0, 10**7), weight=st.floats(0.1, 10.0))
def test_a_tenant_that_was_away_has_no_more_credit_than_stated(
    away_tokens: int, weight: float
) -> None:
    """Another was given `away_tokens` meanwhile, and has more to do."""
    replica = Replica()
    first = offer("b", 0, weight=weight)
    replica.fairness.enter(first, replica.table, 0.0)
    replica.fairness.leave(first, prompt_tokens=1000)
    for n in range(10):
        before = offer("a", n, tokens=away_tokens // 10)
        replica.fairness.enter(before, replica.table, 1.0)
        replica.fairness.leave(before, prompt_tokens=before.prompt_tokens)
    replica.take([offer("a", 10)], 2.0)
    replica.take([offer("b", 1, weight=weight)], 2.0)
    turn = dict(zip(replica.table.slot.tolist(), replica.table.turn.tolist(), strict=True))
    assert turn[0] - turn[1] <= CREDIT_TOKENS + 1e-6


def test_the_last_slots_are_left_to_tenants_that_have_less_than_their_share() -> None:
    replica = Replica(slots=80)
    replica.take(offer("a", n) for n in range(70))
    more, other = offer("a", 70), offer("b", 0)
    replica.fairness.enter(more, replica.table, 0.0)
    assert not replica.fairness.crowds(more, replica.table, 10), "nobody else asks"
    replica.fairness.enter(other, replica.table, 0.0)
    assert replica.fairness.crowds(more, replica.table, 10)
    assert not replica.fairness.crowds(other, replica.table, 10)
    assert not replica.fairness.crowds(more, replica.table, 11), "these are not the last"
    important = offer("a", 71, importance=2.0)
    replica.fairness.enter(important, replica.table, 0.0)
    assert not replica.fairness.crowds(important, replica.table, 10)


# ---------------------------------------------------------------- whole runs


def requests(rates: Mapping[str, float], tier: str, during_s: float) -> list[PlannedRequest]:
    print(f"seed {SEED}")
    rng, drawn = Random(SEED), []
    for tenant, rate in rates.items():
        at_s = rng.expovariate(rate)
        while at_s < during_s:
            prompt = min(int(1500 * rng.lognormvariate(0.0, 0.6)) + 1, 7000)
            drawn.append((at_s, tenant, prompt, int(100 * rng.lognormvariate(0.0, 0.5)) + 1))
            at_s += rng.expovariate(rate)
    return [
        PlannedRequest(n, at_s, prompt, output, tier, 1.0, tenant, "")
        for n, (at_s, tenant, prompt, output) in enumerate(sorted(drawn))
    ]


def met_tokens(policy: str, planned: list[PlannedRequest]) -> dict[str, tuple[float, int]]:
    """The fraction of each tenant's requests that met their SLO, and their tokens."""
    deployment = Deployment(policy, "a100-llama3-8b", facts=ReplicaFacts(max_slots=512))
    options = RunOptions(horizon_s=planned[-1].arrival_s + 5.0)
    verdicts = simulate(Traffic(planned, DEFAULT, SEED), deployment, options).verdicts
    met: dict[str, tuple[float, int]] = {}
    for tenant in sorted({each.tenant for each in planned}):
        own = [n for n, each in enumerate(planned) if each.tenant == tenant]
        good = [n for n in own if (v := verdicts[n]) is not None and v.slo_met]
        met[tenant] = len(good) / len(own), sum(planned[n].prompt_tokens for n in good)
    return met


@pytest.mark.parametrize(
    ("policy", "least"), [pytest.param("slackline", 0.8, marks=pytest.mark.slow), ("qoserve", 0.45)]
)
def test_a_flood_of_one_tenant_leaves_another_its_share(policy: str, least: float) -> None:
    """60 requests a second against 2, where the replica serves 10. Without tenants both meet the
    same part, less than a third. QoServe keeps no more of the requests that are ten times as
    important.
    """
    planned = requests({"large": 60.0, "small": 2.0}, "chat", 60.0)
    alike = [each._replace(tenant="one") for each in planned]
    assert met_tokens(policy, alike)["one"][0] < 0.3
    assert met_tokens(policy, planned)["small"][0] > least
