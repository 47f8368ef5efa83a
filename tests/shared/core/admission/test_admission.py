"""Tests of admission for a request that every replica declined: it joins the pool or is refused."""

from random import Random

from shared.core.admission.admission import (
    AdmissionAction,
    AdmissionCore,
    Answered,
    Heard,
    Opened,
    Place,
    Pooled,
    Refuse,
    Relegate,
)
from shared.policy import registry
from shared.schemas import Digest, OfferDeclined, PoolDigest, PoolLane, Record
from shared.vocabulary import ReplicaId
from tests import made
from tests.shared.core.pooled import NOW, pooled

REPLICA = ReplicaId("r")
FULL = PoolDigest(
    tokens_s=100.0,
    lanes=[PoolLane(tenant="a", importance=1.0, weight=1.0, requests=9, tokens=7000)],
)


def digest(replica: ReplicaId = REPLICA) -> Digest:
    return made.digest(
        replica, incarnation="1", at_unix_s=NOW, model="", kv_blocks=999, kv_free_blocks=999
    )


def declined(record: Record, *, told: bool, pool: PoolDigest = FULL) -> AdmissionAction:
    """The action after the only replica declined the request."""
    core = AdmissionCore(registry.router(registry.DEFAULT, {}), Random(1))
    core.handle(Heard(digest()), now_unix_s=NOW)
    core.handle(Pooled(pool), now_unix_s=NOW)
    (place,) = core.handle(Opened(record, told), now_unix_s=NOW)
    assert isinstance(place, Place)
    (action,) = core.handle(Answered(record.key, 1, REPLICA, OfferDeclined()), now_unix_s=NOW)
    core.check()
    return action


def test_it_goes_into_a_pool_with_room() -> None:
    for told in (True, False):
        action = declined(pooled("b.1"), told=told)
        assert isinstance(action, Relegate)


def test_a_full_pool_refuses_who_has_not_been_told_yet() -> None:
    action = declined(pooled("a.1"), told=False)
    assert isinstance(action, Refuse)
    assert action.retry_after_s == 26.0  # 7,100 tokens at 100/s; of its 60 s it must be sure in 45


def test_a_full_pool_takes_who_was_told_that_it_was_received() -> None:
    assert isinstance(declined(pooled("a.1"), told=True), Relegate)


def test_who_wants_no_best_effort_is_refused_whatever_room_there_is() -> None:
    empty = PoolDigest(tokens_s=100.0, lanes=[])
    action = declined(pooled("b.1", allow_relegation=False), told=False, pool=empty)
    assert isinstance(action, Refuse)


def test_more_important_requests_find_room_where_others_do_not() -> None:
    assert isinstance(declined(pooled("a.1", importance=2.0), told=False), Relegate)
