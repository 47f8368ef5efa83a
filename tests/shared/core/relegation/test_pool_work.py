"""Tests of the work in the best-effort pool: how long a request waits, and if it may enter."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.core.relegation.pool_work import PoolRoom, PoolWork
from shared.schemas import PoolDigest, PoolLane
from tests.shared.core.pooled import NOW, pooled


def lane(tenant: str, tokens: int, importance: float = 1.0, weight: float = 1.0) -> PoolLane:
    return PoolLane(tenant=tenant, importance=importance, weight=weight, requests=1, tokens=tokens)


def room(tokens_s: float, *lanes: PoolLane, limit: int = 100) -> PoolRoom:
    room = PoolRoom(limit)
    room.heard(PoolDigest(tokens_s=tokens_s, lanes=list(lanes)), NOW)
    return room


def test_a_request_waits_for_its_tenant_and_for_as_much_of_each_other() -> None:
    work = PoolWork([lane("a", 1000), lane("b", 50), lane("c", 5000)])
    assert work.before(pooled("a.1")) == 1100 + 50 + 1100
    assert work.before(pooled("new.1")) == 100 + 50 + 100 + 100


def test_a_tenant_of_four_times_the_weight_waits_for_a_quarter_of_the_others_work() -> None:
    work = PoolWork([lane("big", 8000), lane("small", 8000)])
    assert work.before(pooled("big.1", weight=4.0)) == 8100 + 8100 // 4


def test_more_important_work_goes_before_and_less_important_work_does_not() -> None:
    work = PoolWork([lane("a", 1000, importance=2.0), lane("b", 1000, importance=0.5)])
    assert work.before(pooled("c.1")) == 1100
    assert work.before(pooled("a.1")) == 1100  # its tenant's other work is more important
    assert work.before(pooled("b.1", importance=3.0)) == 100


def test_there_is_room_until_a_request_would_have_its_turn_too_late() -> None:
    """A request of 100 tokens waits for 60 s, of which it must be sure after 45."""
    assert room(100.0, lane("a", 4400)).retry_after_s(pooled("a.1"), NOW) is None
    assert room(100.0, lane("a", 4900)).retry_after_s(pooled("a.1"), NOW) == 5.0
    assert room(100.0, lane("a", 4900)).retry_after_s(pooled("b.1"), NOW) is None
    patient = pooled("a.1", begin_by_unix_s=NOW + 3600.0)
    assert room(100.0, lane("a", 4900)).retry_after_s(patient, NOW) is None


def test_what_was_sent_counts_before_the_next_digest_and_once() -> None:
    knows = room(10.0)
    for n in range(4):
        assert knows.retry_after_s(pooled(f"a.{n}"), NOW) is None
        knows.sent(pooled(f"a.{n}"), NOW)
    assert knows.retry_after_s(pooled("a.6"), NOW) == 5.0
    knows.heard(PoolDigest(tokens_s=10.0, lanes=[lane("a", 400)]), NOW + 4.0)
    assert knows.retry_after_s(pooled("a.6"), NOW + 4.0) == 8.0


def test_a_flood_for_one_model_leaves_the_room_of_another() -> None:
    """It has replicas of its own: their speed counts, and the work that waits for them."""
    knows = PoolRoom(100)
    flood = msgspec.structs.replace(lane("a", 1_000_000), model="busy")
    few = msgspec.structs.replace(lane("a", 300), model="idle")
    rates = {"busy": 100.0, "idle": 10.0}
    knows.heard(PoolDigest(tokens_s=110.0, lanes=[flood, few], rates=rates), NOW)
    assert knows.retry_after_s(pooled("a.1", model="busy"), NOW) == 30.0
    assert knows.retry_after_s(pooled("b.1", model="idle"), NOW) is None
    knows.sent(pooled("a.2", model="idle"), NOW)
    assert knows.retry_after_s(pooled("a.3", model="idle"), NOW) == 5.0


def test_the_limit_of_requests_is_shared_by_the_tenants_that_have_any() -> None:
    knows = room(1e9, limit=4)
    for n in range(4):
        assert knows.retry_after_s(pooled(f"a.{n}"), NOW) is None
        knows.sent(pooled(f"a.{n}"), NOW)
    assert knows.retry_after_s(pooled("a.4"), NOW) == 30.0
    for n in range(2):
        assert knows.retry_after_s(pooled(f"b.{n}"), NOW) is None
        knows.sent(pooled(f"b.{n}"), NOW)
    assert knows.retry_after_s(pooled("b.2"), NOW) == 30.0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 500)), max_size=20))
def test_the_work_of_those_that_left_is_gone(requests: list[tuple[str, int]]) -> None:
    work = PoolWork()
    records = [
        pooled(f"{tenant}.{n}", prompt_tokens=tokens) for n, (tenant, tokens) in enumerate(requests)
    ]
    for record in records:
        work.add(record)
    assert sum(each.tokens for each in work.lanes()) == sum(r.work_tokens for r in records)
    for record in records:
        work.add(record, -1)
    assert work.lanes() == []
