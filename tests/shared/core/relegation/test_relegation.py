"""Tests of the core of relegation, which hands requests of the best-effort pool to replicas: it
decides like a plain model that sorts all requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.load_view import STALE_S, TOKEN_S
from shared.core.relegation.pool import FORGET_S, Shares
from shared.core.relegation.relegation import (
    ALONE_MOST,
    ALONE_S,
    Declined,
    Expire,
    Gone,
    Heard,
    Listed,
    Place,
    Queued,
    RelegationCore,
    RelegationEvent,
    RelegationSettings,
    Taken,
)
from shared.core.tick import Tick
from shared.measure import Measure
from shared.schemas import Digest, Record, Resume
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass, Slo
from tests import made

NOW = 1000.0
SETTINGS = RelegationSettings()


def record(
    key: str,
    *,
    arrived_s: float = 0.0,
    importance: float = 1.0,
    prompt: int = 100,
    ttft_s: float | None = None,
    **more: object,
) -> Record:
    values: dict[str, object] = {
        "state": RecordState.RELEGATED, "attempt": 1, "service_class": ServiceClass.BEST_EFFORT,
        "slo": Slo(ttft_s=ttft_s), "importance": importance, "arrived_unix_s": NOW + arrived_s,
        "expires_unix_s": NOW + 1e6, "prompt_tokens": prompt,
    }  # fmt: skip
    return made.record(key, **{**values, **more})


def digest(at_s: float, replica: str = "r", *, surplus: bool = True, **more: object) -> Digest:
    values = {"incarnation": "1", "running": 1, "surplus": surplus, **more}
    return made.digest(replica, at_unix_s=NOW + at_s, **values)


def handed(core: RelegationCore, at_s: float, said: Digest | None = None) -> list[Place]:
    actions = core.handle(Heard(said or digest(at_s)), now_unix_s=NOW + at_s)
    return [a for a in actions if isinstance(a, Place)]


def pool(*records: Record, per_digest: int = 2) -> RelegationCore:
    core = RelegationCore(RelegationSettings(per_digest=per_digest))
    assert core.handle(Listed(records), now_unix_s=NOW) == []
    return core


# ---------------------------------------------------------------- its speed


@pytest.mark.parametrize("declines", [False, True])
@pytest.mark.parametrize("full", [0, 1, 9])  # digests without surplus for each one with
def test_the_speed_of_the_pool_is_that_at_which_requests_leave_it(
    full: int, declines: bool
) -> None:
    core, left, tokens = pool(per_digest=1), 0, 0
    queued = 0
    for tick in range(3000):
        at_s = tick / 10
        while queued < left + 10:
            waits = record(f"a.{queued}", arrived_s=at_s, prompt=990)
            core.handle(Queued(waits), now_unix_s=NOW + at_s)
            queued += 1
        surplus = tick % (full + 1) == 0
        for place in handed(core, at_s, digest(at_s, surplus=surplus)):
            if declines and left % 2 == 0 and tick % 20 < 10:
                core.handle(Declined(place.key, place.replica), now_unix_s=NOW + at_s)
            else:
                core.handle(Taken(place.key), now_unix_s=NOW + at_s)
                left, tokens = left + 1, tokens + 1000
    tokens_s = core.digest(now_unix_s=NOW + 300.0).tokens_s
    assert tokens_s == pytest.approx(tokens / 300.0, rel=0.15)


def test_each_model_has_a_speed_of_its_own() -> None:
    """One is taken at 1,000 tokens a second; nothing waits for the other, and then something."""
    core = pool(per_digest=1)
    for tick in range(600):
        at_s, key = tick / 10, f"t.{tick}"
        if tick % 10 == 0:
            queued = record(key, arrived_s=at_s, prompt=990, model="a")
            core.handle(Queued(queued), now_unix_s=NOW + at_s)
        for place in handed(core, at_s, digest(at_s, "r1", model="a")):
            core.handle(Taken(place.key), now_unix_s=NOW + at_s)
        assert handed(core, at_s, digest(at_s, "r2", model="b")) == []
        core.check()
    told = core.digest(now_unix_s=NOW + 60.0)
    assert told.tokens_s == pytest.approx(sum(told.rates.values()))
    assert told.rates["b"] > 100.0  # as at first: no time of its own has passed


def test_a_replica_takes_only_requests_to_its_model() -> None:
    core = pool(record("t.a", model="a"), record("t.b", model="b"), record("t.any"))
    assert [place.key for place in handed(core, 0.0, digest(0.0, "r2", model="b"))] == [
        "t.any",
        "t.b",
    ]
    assert [place.key for place in handed(core, 0.1, digest(0.1, "r1", model="a"))] == ["t.a"]


# ---------------------------------------------------------------- against a plain one


@dataclass
class Plain:
    """The same decisions by looking at everything, for digests that are 0.1 s apart or more."""

    free: dict[str, Record] = field(default_factory=dict)
    busy: dict[str, Record] = field(default_factory=dict)
    given_to: dict[str, str] = field(default_factory=dict)  # the replica of each that is handed out
    said: dict[str, tuple[Digest, float]] = field(default_factory=dict)
    debited: set[str] = field(default_factory=set)  # replicas that were given some since they said
    given: dict[tuple[float, str], float] = field(default_factory=dict)
    floors: dict[float, float] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)

    def lanes(self, importance: float) -> set[str]:
        return {
            k.split(".")[0]
            for k, r in (self.free | self.busy).items()
            if r.importance == importance
        }

    def enter(self, r: Record) -> None:
        lane = (r.importance, r.key.split(".")[0])
        if lane[1] not in self.lanes(r.importance):
            self.given[lane] = max(self.given.get(lane, 0.0), self.floors.get(r.importance, 0.0))
        self.free[r.key] = r
        self.lift(r.importance, 0.0)

    def leave(self, key: str) -> None:
        r = self.free.pop(key, None) or self.busy.pop(key, None)
        if r is not None:
            self.lift(r.importance, self.given[r.importance, r.key.split(".")[0]])

    def lift(self, importance: float, last: float) -> None:
        present = [self.given[importance, t] for t in self.lanes(importance)]
        self.floors[importance] = min(present) if present else max(self.floors[importance], last)

    def step(self, event: RelegationEvent, now: float) -> list[object]:
        actions: list[object] = []
        match event:
            case Listed(records):
                for key in sorted(set(self.free) - {r.key for r in records}):
                    self.leave(key)
                for r in records:
                    if r.key not in self.free and r.key not in self.busy:
                        self.enter(r)
            case Queued(r):
                if r.key not in self.free and r.key not in self.busy:
                    self.enter(r)
            case Heard(d):
                self.said[d.replica] = d, now
                self.debited.discard(d.replica)
                if d.accepting and now >= self.not_before.get(d.replica, 0.0):
                    self.hand_out(d, now, actions)
            case Taken(key) | Gone(key):
                self.leave(key)
            case Declined(key, replica):
                self.not_before[replica] = now + SETTINGS.declined_s
                if key in self.busy:
                    self.free[key] = self.busy.pop(key)
                    self.given_to.pop(key, None)
        for r in sorted(self.free.values(), key=lambda r: (r.expires_unix_s, r.key)):
            if r.expires_unix_s <= now:
                self.busy[r.key] = self.free.pop(r.key)
                actions.append(Expire(r.key))
        return actions

    def hand_out(self, d: Digest, now: float, actions: list[object]) -> None:
        alone = self.alone(d, now)
        handed, tokens = 0, 0
        while handed < d.free_slots and (
            handed < SETTINGS.per_digest or (handed < alone and tokens < ALONE_S / d.token_s)
        ):
            ahead_s = tokens * d.token_s if alone else 0.0
            ready = [r for r in self.free.values() if d.surplus or attainable(r, d, now, ahead_s)]
            if not ready:
                return
            r = min(
                ready,
                key=lambda r: (
                    -r.importance,
                    self.given[r.importance, r.key.split(".")[0]],
                    r.arrived_unix_s,
                    r.key,
                ),
            )
            computed = r.prompt_tokens + r.resume.measure.tokens
            handed, tokens = handed + 1, tokens + math.ceil(computed / 16) * 16
            self.given[r.importance, r.key.split(".")[0]] += r.prompt_tokens
            self.busy[r.key] = self.free.pop(r.key)
            self.lift(r.importance, 0.0)
            service_class = (
                ServiceClass.STANDARD
                if attainable(r, d, now, ahead_s)
                else ServiceClass.BEST_EFFORT
            )
            self.given_to[r.key] = d.replica
            self.debited.add(d.replica)
            actions.append(Place(r.key, d.replica, d.incarnation, service_class))

    def alone(self, d: Digest, now: float) -> int:
        """The most requests that a replica with best-effort ones alone is handed."""
        like = [
            other.replica
            for other, at in self.said.values()
            if now - at <= STALE_S
            and other.replica not in self.debited
            and other.accepting
            and other.surplus
            and not other.running
            and not other.waiting
        ]
        if d.replica not in like or any(self.given_to.get(key) == d.replica for key in self.busy):
            return 0
        return min(math.ceil(len(self.free) / len(like)), int(0.75 * d.free_slots), ALONE_MOST)


def attainable(r: Record, d: Digest, now: float, ahead_s: float) -> bool:
    due = min(r.slo.last_due_unix_s(r.arrived_unix_s), r.slo.first_due_unix_s(r.arrived_unix_s))
    if r.resume.measure.tokens:
        due = min(r.slo.last_due_unix_s(r.arrived_unix_s), r.resume.measure.next_due_unix_s)
    if d.waiting or r.resume.measure.late_tokens or math.isinf(due):
        return False
    needed_s = (
        d.backlog_s
        + ahead_s
        + 2 * TOKEN_S * r.prompt_tokens
        + (0.0 if r.slo.ttlt_s is None else 0.05 * r.max_tokens)
    )
    return now + SETTINGS.promote_margin * needed_s <= due


KEYS = st.builds("{}.{}".format, st.sampled_from("abc"), st.integers(0, 5))
# Thirds and sevenths: no deadline falls on the instant at which it is looked at, where rounding
# would decide.
RECORDS = st.builds(
    record,
    KEYS,
    arrived_s=st.integers(-5, 5).map(float),
    importance=st.sampled_from([1.0, 10.0]),
    prompt=st.integers(1, 999),
    slo=st.sampled_from(
        [Slo(), Slo(ttft_s=7 + 1 / 3), Slo(ttlt_s=12 + 1 / 7), Slo(ttft_s=2 + 1 / 3, tbt_s=0.1)]
    ),
    resume=st.sampled_from(
        [
            Resume(),
            Resume(measure=Measure(tokens=1, next_due_unix_s=NOW + 9 + 1 / 3)),
            Resume(measure=Measure(tokens=2, late_tokens=1)),
        ]
    ),
    expires_unix_s=st.integers(2, 30).map(lambda s: NOW + s),
)
SAID = st.fixed_dictionaries(
    {
        "replica": st.sampled_from(["r", "s"]),
        "surplus": st.booleans(),
        "waiting": st.sampled_from([0, 0, 1]),
        "running": st.sampled_from([0, 1]),
        "backlog_s": st.sampled_from([0.0, 0.0, 1.0]),
        "free_slots": st.sampled_from([0, 1, 8]),
        "accepting": st.sampled_from([True, True, True, False]),
    }
)
RESULTS = st.sampled_from(["taken", "declined", "gone"])
STEPS = st.one_of(
    st.tuples(st.just("queued"), RECORDS),
    st.tuples(st.just("queued"), RECORDS),
    st.tuples(st.just("listed"), st.lists(RECORDS, max_size=9, unique_by=lambda r: r.key)),
    st.tuples(st.just("heard"), SAID),
    st.tuples(st.just("heard"), SAID),
    st.tuples(st.just("result"), st.tuples(st.integers(0, 9), RESULTS)),
    st.tuples(st.just("gone"), KEYS),
    st.tuples(st.just("tick"), st.none()),
)


@given(st.lists(STEPS, max_size=60))
def test_it_decides_as_one_that_sorts_everything_each_time(
    steps: Sequence[tuple[str, object]],
) -> None:
    core, plain, now = RelegationCore(SETTINGS), Plain(), NOW
    first: dict[str, Record] = {}
    out: list[tuple[RequestKey, ReplicaId | None]] = []  # handed to someone, or expiring
    for kind, value in steps:
        now += 0.25
        event: RelegationEvent = Tick()
        if kind == "queued":
            assert isinstance(value, Record)
            event = Queued(first.setdefault(value.key, value))
        elif kind == "listed":
            event = Listed([first.setdefault(r.key, r) for r in value])  # type: ignore[attr-defined]
        elif kind == "heard":
            event = Heard(digest(now - NOW, **value))  # type: ignore[arg-type]
        elif kind == "gone":
            event = Gone(RequestKey(str(value)))
        elif kind == "result" and out:
            assert isinstance(value, tuple)
            result, (key, replica) = value[1], out[value[0] % len(out)]
            event = (
                Taken(key)
                if result == "taken"
                else Gone(key)
                if result == "gone" or replica is None
                else Declined(key, replica)
            )
        if isinstance(event, Taken | Gone | Declined):
            out = [o for o in out if o[0] != event.key]
        actions = core.handle(event, now_unix_s=now)
        assert actions == plain.step(event, now)
        for action in actions:
            assert action.key not in [key for key, _ in out], "handed twice"
            out.append((action.key, action.replica if isinstance(action, Place) else None))
        assert core.waiting == len(plain.free) + len(plain.busy)
        assert core.idle == (not plain.busy)
        assert core.wake_at_unix_s() == min(
            (r.expires_unix_s for r in plain.free.values()), default=None
        )


# ---------------------------------------------------------------- what that means


def test_tenants_that_left_long_ago_are_forgotten() -> None:
    shares = Shares()
    for i in range(1000):
        lane = (-1.0 - i % 3, f"t{i}")
        shares.enter(lane, NOW + i)
        shares.leave(lane, NOW + i)
    assert len(shares) <= FORGET_S + 1
    shares.enter((-1.0, "late"), NOW + 10 * FORGET_S)
    assert len(shares) == 1


def test_a_digest_that_comes_twice_hands_out_once() -> None:
    core = pool(*(record(f"t.{i}") for i in range(9)))
    said = digest(1.0)
    assert len(handed(core, 1.0, said)) == 2
    assert handed(core, 1.2, said) == []
    assert handed(core, 1.3, digest(0.9)) == []
    assert len(handed(core, 1.4, digest(1.1))) == 2


def test_a_planner_whose_clock_is_far_off_is_given_work_all_the_same() -> None:
    for skew_s in (-3600.0, -3.0, 3.0, 3600.0):
        core = pool(*(record(f"t.{i}") for i in range(9)))
        assert len(handed(core, 1.0, digest(1.0 + skew_s))) == 2
        assert len(handed(core, 1.1, digest(1.1 + skew_s))) == 2
