"""Tests of the account of where a request's time went: it adds up to the request's life, across
attempts, and is the same from the worker and from its log.
"""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.columns import pack
from shared.core.record import record as life
from shared.core.record.time_accounting import Chunk, Spent, TimeAccounting
from shared.core.worker.step import Ran, TurnDone
from shared.request_timeline import (
    CAUSES,
    HAPPENINGS,
    Account,
    Happened,
    Happening,
    Neighbour,
    RequestTimeline,
    merged,
)
from shared.schemas import AttemptOver, Body, Held, LogEntry, Record, Sampling
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass, Slo
from tests import made
from tests.simulated.folding import fold

SLOTS, PROMPT, OUTPUT = 6, 40, 12
CLOSE_S = 1e-6


def new_record(number: int, now_s: float) -> Record:
    tenant, tier = ("acme", "other")[number % 2], ("chat", "summary")[number // 2 % 2]
    return made.record(
        f"{tenant}.q{number}",
        owner="admission-1",
        tier=tier,
        slo=Slo(ttft_s=0.5, tbt_s=0.03),
        arrived_unix_s=now_s,
        prompt_tokens=PROMPT,
        max_tokens=OUTPUT,
    )


class Replica:
    """A worker core whose engine makes up what it did, and its log."""

    def __init__(self, name: str, rng: Random) -> None:
        self.core = made.worker_core(name, kv_blocks=1000, context_tokens=4096, max_slots=SLOTS)
        self.rng, self.seq = rng, 0
        self.log: list[LogEntry] = []
        self.slots: dict[int, Record] = {}

    def hold(self, record: Record, now_s: float) -> bool:
        free = [slot for slot in range(SLOTS) if slot not in self.slots]
        if not free:
            return False
        slot = self.rng.choice(free)
        body = Body(
            prompt=pack([1] * PROMPT), sampling=Sampling(max_tokens=OUTPUT, ignore_eos=True)
        )
        made.hold(self.core, slot, record, body, now_unix_s=now_s)
        self.slots[slot] = record
        return True

    def iterate(self, now_s: float) -> tuple[float, list[AttemptOver]]:
        rng, here = self.rng, sorted(self.slots)
        run = rng.sample(here, rng.randint(0, len(here)))
        left = [slot for slot in here if rng.random() < 0.04]
        self.seq += 1
        predicted_s = rng.choice([0.0, 0.02, 0.1])
        plan = made.plan(
            run,
            [rng.choice([1, 7, 50]) for _ in run],
            replica=self.core.replica,
            seq=self.seq,
            predicted_s=predicted_s,
            decodes_s=predicted_s * rng.random(),
            released=pack(left),
            released_why=[rng.choice(["drained", "relegated"]) for _ in left],
            preempted=pack([slot for slot in here if rng.random() < 0.03]),
            relegated=pack([slot for slot in here if rng.random() < 0.03]),
        )
        assert self.core.plan(plan) is None
        turn = self.core.begin(now_unix_s=now_s)
        assert turn is not None
        started_s = now_s + rng.choice([0.0, 0.001, 0.5])
        exec_s = rng.choice([0.005, 0.02, 0.3])
        ended_s = started_s + exec_s * rng.choice([0.9, 1.0, 1.1])
        done = [
            TurnDone(
                work.tokens,
                (5,) if work.emits else (),
                "a" if work.emits else "",
                work.limit_reason if work.emits and work.limit == 1 else None,
            )
            for work in turn.work
        ]
        finished = self.core.finish(
            Ran(done, exec_s), started_unix_s=started_s, ended_unix_s=ended_s, idle_s=0.0
        )
        self.core.check()
        self.log.append(finished.ack)
        if rng.random() < 0.1:
            self.log = list(self.core.snapshots())
        for slot, _ in finished.ack.ended:
            del self.slots[slot]
        return ended_s, list(finished.overs)


def check(account: Account, arrived_s: float) -> None:
    assert all(account.seconds(cause) >= 0.0 for cause in CAUSES), account
    assert account.total_s == pytest.approx(account.until_unix_s - arrived_s, abs=CLOSE_S)
    others_s = account.queue_s + account.beside_s + account.sat_out_s + account.relegated_s
    assert sum(n.seconds for n in account.neighbours) <= others_s + CLOSE_S
    assert all(n.seconds >= 0.0 and n.requests > 0 for n in account.neighbours)


def alike(one: RequestTimeline, other: RequestTimeline) -> None:
    """The same timeline, but for the last bits of sums that were added in another order, and for
    neighbours that were counted before and after a snapshot.
    """
    accounts = [(one.account, other.account)]
    if one.late and other.late:
        accounts.append((one.late.account, other.late.account))
    for a, b in accounts:
        for cause in CAUSES:
            assert a.seconds(cause) == pytest.approx(b.seconds(cause), abs=CLOSE_S), cause
        assert {(n.tenant, n.tier) for n in a.neighbours} == {
            (n.tenant, n.tier) for n in b.neighbours
        }
    assert one.happenings == other.happenings
    assert (one.late is None) == (other.late is None)
    if one.late and other.late:
        assert one.late.token == other.late.token
        assert one.late.due_unix_s == pytest.approx(other.late.due_unix_s)
        assert one.late.came_unix_s == other.late.came_unix_s


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 1 << 32))
def test_an_account_adds_up_to_the_life_of_its_request_across_replicas_and_the_log_tells_the_same(
    seed: int,
) -> None:
    rng = Random(seed)
    replicas = [Replica("r1", rng), Replica("r2", rng)]
    now_s, records, waiting = 100.0, dict[RequestKey, Record](), list[RequestKey]()
    for number in range(80):
        if rng.random() < 0.3:
            record = new_record(number, now_s)
            records[record.key] = record
            waiting.append(record.key)
        replica = rng.choice(replicas)
        now_s += rng.choice([0.0, 0.001, 0.2])
        for key in list(waiting):
            if len(replica.slots) < SLOTS:
                records[key] = place(records[key], replica.core.replica, now_s)
                replica.hold(records[key], now_s)
                waiting.remove(key)
        now_s, overs = replica.iterate(now_s)
        stories = fold(replica.log, replica.core.replica)
        for page in replica.core.snapshots():
            for entry in page.entries:
                record = records[entry.held.key]
                story = stories[record.key, record.attempt, "i"]
                alike(entry.diary, story.resume(record).diary)
        for over in overs:
            check(over.resume.diary.account, records[over.key].arrived_unix_s)
            now_s += rng.choice([0.0, 0.01])
            after = life.settled(records[over.key], over, "admission-1", now_s)
            assert after is not None
            records[over.key] = after
            if after.verdict is None:
                waiting.append(over.key)
    for record in records.values():
        if record.verdict is not None:
            check_end(record)
    assert records


def place(record: Record, replica: ReplicaId, now_s: float) -> Record:
    if record.state == RecordState.RELEGATED:
        best_effort = ServiceClass.BEST_EFFORT
        placed = life.drawn(record, "relegation-1", replica, "i", best_effort, now_unix_s=now_s)
    else:
        attempt, owner = record.attempt, record.owner
        placed = life.placed(record, owner, replica, "i", attempt=attempt, now_unix_s=now_s)
    assert placed is not None
    return placed


def check_end(record: Record) -> None:
    verdict, timeline = record.verdict, record.resume.diary
    assert verdict is not None
    check(timeline.account, record.arrived_unix_s)
    assert timeline.account.until_unix_s == pytest.approx(verdict.ended_unix_s)
    assert len(timeline.happenings) <= HAPPENINGS
    times = [happening.at_unix_s for happening in timeline.happenings]
    assert times == sorted(times)
    held = sum(happening.what is Happened.HELD for happening in timeline.happenings)
    assert held == record.attempt or timeline.left_out
    first = verdict.first_missed
    assert (first is None) == verdict.slo_met
    if first is not None:
        assert first.cause and first.cause_s > 0.0
        assert first.came_s is not None and first.came_s > first.due_s


def held(slot: int, key: str, at_s: float) -> Held:
    return Held(slot=slot, key=RequestKey(key), attempt=1, tier="chat", at_unix_s=at_s)


def decodes(ended_s: float, exec_s: float) -> Spent:
    return Spent(ended_s, exec_s, 0.0, 0.0)


def test_a_request_that_waits_behind_two_prefills_of_others_says_so() -> None:
    accounting = TimeAccounting("r1")
    for slot, key in enumerate(("acme.a", "acme.b", "mine.c")):
        accounting.held(held(slot, key, 10.0), RequestTimeline().waited(9.5, 10.0))
    accounting.ran([0, 1], [Chunk(0, 300, True), Chunk(1, 100, True)], decodes(10.5, 0.4))
    accounting.ran([0, 1, 2], [Chunk(2, 100, True)], Spent(10.8, 0.3, 0.1, 0.0))
    account = accounting.timeline(2).account
    assert account.placing_s == pytest.approx(0.5)
    assert account.queue_s == pytest.approx(0.4)
    assert account.prefill_s == pytest.approx(0.2)
    assert account.decodes_s == pytest.approx(0.1)
    assert account.control_s == pytest.approx(0.1)
    [whose] = account.neighbours
    assert (whose.tenant, whose.tier, whose.requests) == ("acme", "chat", 2)
    assert whose.seconds == pytest.approx(0.4)
    check(account, 9.5)


@pytest.mark.parametrize(
    ("spoke", "why", "again"),
    [(True, "drained", True), (True, "relegated", False), (False, "drained", False)],
)
def test_what_is_computed_again_behind_a_move_counts_as_the_move(
    spoke: bool, why: str, again: bool
) -> None:
    before = RequestTimeline()
    if spoke:
        before = before.noted(Happening(at_unix_s=9.0, what=Happened.FIRST_TOKEN, replica="r0"))
    before = before.left("r0", why, 9.5).waited(9.5, 10.0)
    accounting = TimeAccounting("r1")
    accounting.held(held(0, "acme.a", 10.0), before)
    accounting.ran([0], [Chunk(0, 300, True)], Spent(10.5, 0.5, 0.1, 0.0))
    account = accounting.timeline(0).account
    between_s = 0.5 if why == "drained" else 0.0
    assert account.moving_s == pytest.approx(between_s + (0.4 if again else 0.0))
    assert account.prefill_s == pytest.approx(0.0 if again else 0.4)
    check(account, 9.5)


def test_neighbours_beyond_the_largest_are_summed_up() -> None:
    each = [Neighbour(f"t{n}", "chat", 1, float(n)) for n in range(1, 8)]
    found = merged([*each, Neighbour("t7", "chat", 1, 1.0)])
    assert [(n.tenant, n.requests, n.seconds) for n in found] == [
        ("t7", 2, 8.0),
        ("t6", 1, 6.0),
        ("t5", 1, 5.0),
        ("t4", 1, 4.0),
        ("", 3, 6.0),
    ]


def test_a_timeline_keeps_the_first_and_the_last_steps() -> None:
    accounting = TimeAccounting("r1")
    accounting.held(held(0, "acme.a", 0.0), RequestTimeline())
    for n in range(100):
        accounting.note(Happened.PREEMPTED, [0], float(n))
    timeline = accounting.leave(0)
    assert len(timeline.happenings) == HAPPENINGS
    assert timeline.left_out == 101 - HAPPENINGS
    assert timeline.happenings[0].what is Happened.HELD
    assert timeline.happenings[-1].at_unix_s == 99.0
