"""Tests of LoadView, a router's view: each replica's newest digest, less what was placed since."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.load_view import FORGET_S, STALE_S, LoadView
from shared.schemas import Digest
from shared.vocabulary import ReplicaId
from tests import made

NOW = 1000.0
R1 = ReplicaId("r1")


def digest(
    at_unix_s: float,
    replica: str = "r1",
    planner: str = "p",
    incarnation: str = "1",
    backlog_s: float = 0.0,
) -> Digest:
    return made.digest(
        replica,
        incarnation=incarnation,
        planner=planner,
        at_unix_s=at_unix_s,
        model="",
        backlog_s=backlog_s,
        free_slots=64,
    )


@pytest.mark.parametrize("skew_s", [-3600.0, -3.0, 0.0, 3.0, 3600.0])
def test_staleness_and_debits_do_not_depend_on_the_planners_clock(skew_s: float) -> None:
    debits = LoadView()
    assert debits.received(digest(NOW + skew_s), NOW)
    debits.placed(R1, 500, NOW + 0.01)
    view = debits.views(NOW + 0.02)[R1]
    assert (view.waiting, view.waiting_prefill_tokens, view.free_slots, view.surplus) == (
        1,
        500,
        63,
        False,
    )
    assert view.at_unix_s == NOW  # routers reckon with our clock
    assert debits.received(digest(NOW + 0.04 + skew_s), NOW + 0.04)
    assert debits.views(NOW + 0.04)[R1].waiting == 1  # on its way yet
    assert debits.received(digest(NOW + 0.10 + skew_s), NOW + 0.10)
    assert debits.views(NOW + 0.10)[R1].waiting == 0
    assert R1 in debits.views(NOW + 0.10 + STALE_S)
    assert R1 not in debits.views(NOW + 0.11 + STALE_S)


def test_digests_are_ordered_within_one_planner_and_incarnation_only() -> None:
    debits = LoadView()
    assert debits.received(digest(NOW, backlog_s=1.0), NOW)
    assert not debits.received(digest(NOW - 0.1, backlog_s=2.0), NOW + 0.1)
    assert not debits.received(digest(NOW, backlog_s=2.0), NOW + 0.1)
    assert debits.views(NOW + 0.1)[R1].backlog_s == 1.0
    assert debits.received(digest(NOW - 50, planner="q", backlog_s=3.0), NOW + 0.2)
    assert debits.received(digest(NOW - 60, planner="q", incarnation="2", backlog_s=4.0), NOW + 0.3)
    assert debits.views(NOW + 0.3)[R1].backlog_s == 4.0


def test_replicas_silent_for_ten_minutes_are_forgotten() -> None:
    debits = LoadView()
    for i in range(5000):
        debits.received(digest(NOW + i, f"x{i}"), NOW + i)
        debits.received(digest(NOW + i), NOW + i)
        debits.placed(ReplicaId(f"unknown{i}"), 1, NOW + i)
    known = [i for i in range(5000) if debits.raw(ReplicaId(f"x{i}")) is not None]
    assert known == list(range(5000 - 1 - int(FORGET_S), 5000))
    assert debits.raw(R1) is not None
    assert not any(debits.raw(ReplicaId(f"unknown{i}")) for i in range(5000))
    assert list(debits.views(NOW + 4999)) == sorted(
        [R1, ReplicaId("x4997"), ReplicaId("x4998"), ReplicaId("x4999")]
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["received", "placed", "gone"]),
            st.sampled_from("abc"),
            st.integers(0, 900),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_the_debited_view_is_the_digest_and_the_sum_of_what_was_placed_since(
    steps: list[tuple[str, str, int, bool]],
) -> None:
    debits, now = LoadView(), NOW
    received: dict[str, float] = {}
    placed: dict[str, list[tuple[float, int, bool]]] = {}
    for what, replica, tokens, best_effort in steps:
        now += 1 / 64
        if what == "received":
            debits.received(digest(now, replica), now)
            received[replica] = now
            placed[replica] = [p for p in placed.get(replica, []) if p[0] >= now - 0.05]
        elif what == "placed":
            debits.placed(ReplicaId(replica), tokens, now, best_effort=best_effort)
            if replica in received:
                placed[replica].append((now, tokens, best_effort))
        else:
            debits.gone(ReplicaId(replica))
            received.pop(replica, None)
            placed.pop(replica, None)
        views = debits.views(now)
        assert list(views) == sorted(received)
        for name, view in views.items():
            since = placed[name]
            assert view.at_unix_s == received[name]
            assert view.waiting_prefill_tokens == sum(p[1] for p in since)
            assert (view.waiting, view.best_effort) == (
                sum(not p[2] for p in since),
                sum(p[2] for p in since),
            )
            assert view.free_slots == max(0, 64 - len(since))
            assert math.isclose(view.backlog_s, 1e-4 * sum(p[1] for p in since), abs_tol=1e-12)
