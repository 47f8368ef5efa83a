"""Tests of where a request goes by the roles of replicas, and where it goes on."""

from random import Random

import pytest
from msgspec.structs import replace

from shared.routing.apart import then
from shared.routing.routings import named
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, Role, ServiceClass
from tests import made

SLOW, FAST = 1e-3, 1e-6  # seconds for a token's KV to move; to compute it takes 1e-4 here


def replica(name: str, role: Role) -> Digest:
    return made.digest(
        name, role=role, token_s=1e-4, decode_s=0.02, kv_move_s=FAST, kv_blocks=1000,
        kv_free_blocks=1000,
    )  # fmt: skip


def order(offer: Offer, *digests: Digest) -> list[str]:
    by_id = {digest.replica: digest for digest in digests}
    return list(named("in_time")(offer, by_id, Random(1)))


def goes_on(offer: Offer, first: Digest, *others: Digest) -> str | None:
    found = then(offer, first, {digest.replica: digest for digest in (first, *others)})
    return None if found is None else found.replica


P = replica("p", Role.PREFILL)
D, E = replica("d", Role.DECODE), replica("e", Role.DECODE)
B = replica("b", Role.BOTH)
NEW = made.offer(prompt_tokens=4000)
MADE = replace(NEW, generated_tokens=1, then=ReplicaId("e"), kv_at=ReplicaId("p"), kv_tokens=4000)


def test_a_prompt_goes_to_who_computes_prompts_and_what_has_tokens_to_who_decodes() -> None:
    assert order(NEW, P, D, E) == ["p"]
    assert order(replace(MADE, kv_at=None), P, D, E) == ["e", "d"]


def test_what_was_handed_over_goes_first_to_where_it_was_to_go_on_and_last_to_where_it_was() -> (
    None
):
    assert order(MADE, P, D, E) == ["e", "d", "p"]


def test_a_replica_of_both_takes_either() -> None:
    assert set(order(NEW, P, D, B)) == {"p", "b"}
    assert set(order(MADE, D, B)) == {"d", "b"}


@pytest.mark.parametrize(("move_s", "first"), [(FAST, "p"), (SLOW, "b")])
def test_a_request_is_apart_only_where_that_is_sooner_with_the_time_for_its_kv(
    move_s: float, first: str
) -> None:
    busy = replace(B, waiting=4, backlog_s=0.2, kv_move_s=move_s)
    assert order(NEW, P, busy)[0] == first


def test_a_prompt_that_is_kept_where_it_decodes_is_not_computed_elsewhere() -> None:
    busy = replace(B, waiting=1, backlog_s=0.05)
    assert order(NEW, P, busy)[0] == "p"
    assert order(NEW, P, replace(busy, cached_tokens=3900))[0] == "b"


def test_without_a_replica_that_suits_any_does() -> None:
    assert order(NEW, D, E) and set(order(NEW, D, E)) == {"d", "e"}
    assert order(MADE, replica("q", Role.PREFILL)) == ["q"]


def test_best_effort_work_goes_where_there_is_room() -> None:
    offer = replace(NEW, service_class=ServiceClass.BEST_EFFORT)
    assert set(order(offer, P, D)) == {"p", "d"}


def test_a_request_goes_on_where_its_second_token_comes_soonest() -> None:
    assert goes_on(NEW, P, D, replace(E, decode_s=0.01)) == "e"
    assert goes_on(NEW, P, D, replace(E, kv_move_s=SLOW)) == "d"
    assert (
        goes_on(NEW, P, replace(D, kv_move_s=SLOW), replace(E, kv_move_s=SLOW, cached_tokens=3000))
        == "e"
    )


def test_a_request_stays_where_nobody_could_take_it_over() -> None:
    assert goes_on(NEW, P) is None
    assert goes_on(NEW, P, replace(D, kv_move_s=0.0)) is None
    assert goes_on(NEW, P, replace(D, free_slots=0)) is None
    assert goes_on(NEW, P, replace(D, kv_free_blocks=10)) is None
    assert goes_on(NEW, P, replace(D, accepting=False)) is None
    assert goes_on(replace(NEW, model="m"), P, replace(D, model="another")) is None
    assert goes_on(NEW, B, D) is None
    assert goes_on(MADE, P, D) is None


def test_a_prompt_without_a_place_to_go_on_is_not_given_to_who_computes_prompts() -> None:
    assert order(NEW, P, replace(B, kv_move_s=0.0)) == ["b"]
