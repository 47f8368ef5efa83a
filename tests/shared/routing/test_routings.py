"""Tests of the named routings: attainable, round robin, SLOs-Serve's and Ascendra's."""

import math
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError
from shared.policy import registry
from shared.policy.ascendra.policy import HP, LP
from shared.routing.routings import named, one_offer, sequential, with_tickets
from shared.routing.scorers import BACKLOG_STEP, KV_STEP, KV_TIGHT
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, ServiceClass, Slo
from tests.shared.routing.digests import NOW, digest, fleet, offer

# ---------------------------------------------------------------- attainable


def test_alike_replicas_share_by_chance_and_the_same_seed_decides_alike() -> None:
    digests = fleet(*(digest(f"r{i}", backlog_s=0.001 * i) for i in range(4)))
    router = named("attainable")
    firsts = [router(offer(), digests, Random(seed))[0] for seed in range(200)]
    assert {firsts.count(f"r{i}") > 20 for i in range(4)} == {True}
    assert firsts == [router(offer(), digests, Random(seed))[0] for seed in range(200)]


# ---------------------------------------------------------------- in time


def by_one_key(
    offer: Offer, digests: Mapping[ReplicaId, Digest], left_s: float, rng: Random
) -> Sequence[ReplicaId]:
    """The order of `attainable` as one tuple; a draw for each accepting replica, in order of id."""

    def key(digest: Digest) -> tuple[bool, bool, bool, int, int, float]:
        backlog_s = digest.backlog_s
        standard = offer.service_class is ServiceClass.STANDARD
        hopeless = backlog_s >= left_s if standard else not digest.surplus
        relative = backlog_s / left_s if 0 < left_s < math.inf else backlog_s
        free = digest.kv_free_blocks / max(1, digest.kv_blocks)
        return (
            digest.free_slots <= 0,
            hopeless,
            free < KV_TIGHT,
            round(min(relative, 1e6) / BACKLOG_STEP),
            int((1 - free) / KV_STEP),
            rng.random(),
        )

    keys = {r: key(digests[r]) for r in sorted(digests) if digests[r].accepting}
    return sorted(keys, key=keys.__getitem__)


replicas = st.builds(
    lambda **values: values,
    backlog_s=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.5, 1e9]),
    kv_free_blocks=st.integers(0, 1000),
    free_slots=st.integers(0, 2),
    surplus=st.booleans(),
    accepting=st.booleans(),
)


@given(
    fleet_of=st.lists(replicas, max_size=8),
    ttft_s=st.sampled_from([None, 0.5, 1.0, 60.0]),
    age_s=st.sampled_from([0.0, 0.7, 5.0]),
    best_effort=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_pipeline_orders_as_one_key_would_with_the_same_draws(
    fleet_of: list[dict[str, object]],
    ttft_s: float | None,
    age_s: float,
    best_effort: bool,
    seed: int,
) -> None:
    digests = fleet(*(digest(f"r{7 - i}", **values) for i, values in enumerate(fleet_of)))
    asked = offer(
        slo=Slo(ttft_s=ttft_s),
        arrived_unix_s=NOW - age_s,
        service_class=ServiceClass.BEST_EFFORT if best_effort else ServiceClass.STANDARD,
    )
    left_s = math.inf if best_effort or ttft_s is None else NOW - age_s + ttft_s - NOW
    ours, theirs = Random(seed), Random(seed)
    expected = by_one_key(asked, digests, left_s, theirs)
    assert named("attainable")(asked, digests, ours) == expected
    assert ours.random() == theirs.random()


HOT = {"waiting": 2, "running": 12, "backlog_s": 0.15, "cached_tokens": 3000}
COLD = {"waiting": 1, "running": 4, "backlog_s": 0.02}
CROWDED = {"waiting": 10, "running": 12, "backlog_s": 0.9, "cached_tokens": 3000}


@pytest.mark.parametrize(
    ("hot", "ttft_s", "first"),
    [(HOT, 4.0, "hot"), (CROWDED, 4.0, "cold"), ({**HOT, "backlog_s": 1.0}, 0.5, "cold")],
    ids=["as on the page", "a crowd", "it would be late"],
)
def test_a_prompt_goes_where_it_was_computed_while_that_takes_less_time_from_all(
    hot: dict[str, float], ttft_s: float, first: str
) -> None:
    digests = fleet(digest("hot", token_s=1e-4, **hot), digest("cold", token_s=1e-4, **COLD))
    asked = offer(prompt_tokens=4000, slo=Slo(ttft_s=ttft_s), next_due_unix_s=NOW + ttft_s)
    assert named("in_time")(asked, digests, Random(1))[0] == first


def test_alike_replicas_are_taken_in_turn_by_in_time() -> None:
    digests = fleet(*(digest(f"r{i}", cached_tokens=64) for i in range(3)))
    router = named("in_time")
    firsts = [router(offer(), digests, Random(1))[0] for _ in range(6)]
    assert sorted(firsts[:3]) == ["r0", "r1", "r2"] and firsts[3:] == firsts[:3]


# ---------------------------------------------------------------- in turn


def test_round_robin_begins_one_further_each_time_and_names_all() -> None:
    digests = fleet(*(digest(f"r{i}") for i in range(3)), digest("gone", accepting=False))
    router = named("round_robin")
    orders = [list(router(offer(), digests, Random(1))) for _ in range(4)]
    assert [order[0] for order in orders] == ["r0", "r1", "r2", "r0"]
    assert all(sorted(order) == ["r0", "r1", "r2"] for order in orders)
    assert router(offer(), {}, Random(1)) == []


def test_sequential_asks_in_turn_and_the_next_replica_after_a_decline() -> None:
    digests = fleet(*(digest(name) for name in "abc"))
    router, new, declined = sequential(), offer(attempt=0), offer(attempt=1)
    assert [router(new, digests, Random(1))[0] for _ in range(4)] == ["a", "b", "c", "a"]
    assert router(declined, digests, Random(1)) == ["b", "c", "a"]
    # a request that is offered again takes no turn
    assert router(new, digests, Random(1)) == ["b", "c", "a"]


def test_one_offer_asks_no_second_replica_unless_the_request_was_held_in_between() -> None:
    digests = fleet(*(digest(name) for name in "abc"))
    router = one_offer()
    assert router(offer(attempt=1), digests, Random(1)) == []
    assert router(offer(attempt=1, left="drained"), digests, Random(1)) == ["a", "b", "c"]
    assert router(offer(attempt=0), digests, Random(1)) == ["b", "c", "a"]


# ---------------------------------------------------------------- Ascendra's controller


def test_new_requests_go_to_lp_in_turn_and_offloaded_ones_to_hp_in_turn() -> None:
    router = with_tickets("round_robin", HP)
    pools = {"a": LP, "b": HP, "c": "", "d": HP}
    digests = fleet(*(digest(name, pool=pool, waiting=1) for name, pool in pools.items()))
    firsts = [list(router(offer(), digests, Random(1))) for _ in range(4)]
    assert [order[0] for order in firsts] == ["a", "c", "a", "c"]
    moved = [list(router(offer(left="offloaded"), digests, Random(1))) for _ in range(4)]
    assert [order[0] for order in moved] == ["b", "d", "b", "d"]
    assert all(sorted(order) == ["a", "b", "c", "d"] for order in firsts + moved)


def test_the_next_request_goes_to_an_hp_with_a_ticket_and_asks_no_second_one() -> None:
    low = [digest("a", pool=LP), digest("d", pool=LP, waiting=1)]
    digests = fleet(*low, digest("b", pool=HP), digest("c", pool=HP))
    order = list(with_tickets("round_robin", HP)(offer(), digests, Random(1)))
    assert order[0] in ("b", "c")
    assert sorted(order[1:3]) == ["a", "d"]
    busy = fleet(*low, digest("b", pool=HP, waiting=1), digest("c", pool=HP, waiting=1))
    assert with_tickets("round_robin", HP)(offer(), busy, Random(1))[0] == "a"


# ---------------------------------------------------------------- the routing of a policy


@pytest.mark.parametrize("name", registry.names())
def test_every_policy_can_be_routed_round_robin(name: str) -> None:
    router = registry.router(name, {"router": "round_robin"})
    digests = fleet(*(digest(name, waiting=1) for name in "abc"))
    firsts = [router(offer(attempt=0), digests, Random(1))[0] for _ in range(4)]
    assert firsts == ["a", "b", "c", "a"]


def test_settings_name_the_routing_and_two_admissions_share_no_turn() -> None:
    digests = fleet(digest("a"), digest("b"))
    first, second = (registry.router("ascendra") for _ in range(2))
    assert [first(offer(), digests, Random(1))[0] for _ in range(2)] == ["a", "b"]
    assert second(offer(), digests, Random(1))[0] == "a"
    with pytest.raises(ConfigError, match=r"router"):
        registry.router("qoserve", {"router": "nearest"})
    with pytest.raises(ConfigError, match=r"nosuch.*fcfs"):
        registry.router("nosuch")
