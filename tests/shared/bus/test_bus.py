"""Tests that each Bus passes, the one on NATS and the simulated one: requests, messages, keys,
leases, logs. `bus_pair` is two connections to one network.
"""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from msgspec import Struct

from shared.bus.api import LEASE_TTL_S, Bus, Call, Endpoint, RefusedError, Subscription
from shared.bus.nats import NatsBus, connect
from shared.errors import BusTimeout, NoResponders, PeerError, WrongSequence
from shared.schemas import Attach, Cancel, LeaseValue, Refused
from shared.subjects import ack_log
from shared.vocabulary import ReplicaId
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import VirtualTimeLoop

pytestmark = pytest.mark.asyncio
# read by conftest.py
LOOP_FACTORIES = {"nats": asyncio.new_event_loop, "simulated": VirtualTimeLoop}
BusPair = tuple[Bus, Bus]
WITHIN_S = 60.0  # the longest that a busy machine may take for anything
TRIES = 10  # of what the shortest time to live allows only where the machine keeps the pace


class Echo(Struct, frozen=True, kw_only=True):
    text: str
    number: int = 0


@pytest_asyncio.fixture
async def bus_pair(request: pytest.FixtureRequest) -> AsyncIterator[BusPair]:
    if isinstance(asyncio.get_running_loop(), VirtualTimeLoop):
        net = SimNet(random.Random(1))
        yield net.connect("one"), net.connect("two")
        return
    url = request.getfixturevalue("nats_url")
    async with (
        connect(url, "one", store_timeout_s=WITHIN_S) as one,
        connect(url, "two", store_timeout_s=WITHIN_S) as two,
    ):
        yield one, two


@pytest.fixture
def unique() -> str:
    """A token that no other test has: subjects and keys of one server are shared."""
    return uuid.uuid4().hex[:12]


async def until(happened: Callable[[], Any], *, within_s: float = WITHIN_S) -> None:
    async with asyncio.timeout(within_s):
        while not happened():
            await asyncio.sleep(0.005)


class Replies:
    """Replies made later and elsewhere than in the handler, as services do; failures surface at the
    end.
    """

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def later(self, call: Call, msg: Struct) -> None:
        self._tasks.append(asyncio.create_task(call.reply(msg)))

    async def done(self) -> None:
        await asyncio.gather(*self._tasks)


async def serve(
    bus: Bus, subject: str, handle: Callable[[Any, Call], None], queue: str = "", kind: Any = Echo
) -> Subscription:
    return await bus.serve("tests", [Endpoint("tests", subject, kind, handle, queue=queue)], {})


# ---------------------------------------------------------------- messages


async def test_a_request_to_nobody_fails_at_once(bus_pair: BusPair, unique: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(NoResponders):
            await bus_pair[0].request(f"t.{unique}", Echo(text=""), Echo, timeout_s=600.0)


async def test_each_of_many_requests_has_a_deadline_of_its_own(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    calls: list[Call] = []
    await one.subscribe(f"t.{unique}", Echo, lambda msg, call: calls.append(call))
    ask = Echo(text="")
    patient = asyncio.ensure_future(two.request(f"t.{unique}", ask, Echo, timeout_s=WITHIN_S))
    await until(lambda: calls)
    for _ in range(2):
        with pytest.raises(BusTimeout):
            await two.request(f"t.{unique}", ask, Echo, timeout_s=0.1)
    assert not patient.done()
    await calls[0].reply(Echo(text="late"))
    assert await patient == Echo(text="late")


async def test_a_refusal_reaches_the_asker_with_its_reasons(bus_pair: BusPair, unique: str) -> None:
    one, two = bus_pair
    replies = Replies()
    refused = Refused(code="slow_down", message="not now", param="slo", retry_after_s=3.0)
    await one.subscribe(f"t.{unique}", Echo, lambda msg, call: replies.later(call, refused))
    with pytest.raises(RefusedError) as caught:
        await two.request(f"t.{unique}", Echo(text=""), Echo, timeout_s=WITHIN_S)
    assert caught.value.refused == refused
    assert (caught.value.code, caught.value.param) == ("slow_down", "slo")
    await replies.done()


async def test_an_answer_of_another_kind_is_the_peers_error(bus_pair: BusPair, unique: str) -> None:
    one, two = bus_pair
    replies = Replies()
    await one.subscribe(f"t.{unique}", Echo, lambda msg, call: replies.later(call, Cancel()))
    with pytest.raises(PeerError):
        await two.request(f"t.{unique}", Echo(text=""), Echo, timeout_s=WITHIN_S)
    await replies.done()


async def test_a_payload_of_another_kind_is_refused_and_no_handler_sees_it(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    seen: list[Attach] = []
    await serve(one, f"t.{unique}.a", lambda msg, call: seen.append(msg), "tests", Attach)
    await one.subscribe(f"t.{unique}.b", Attach, lambda msg, call: seen.append(msg))
    for subject in (f"t.{unique}.a", f"t.{unique}.b"):
        with pytest.raises(RefusedError) as caught:
            await two.request(subject, Echo(text="no request_id"), Attach, timeout_s=WITHIN_S)
        assert caught.value.refused.code == "invalid_request_error"
        assert "request_id" in caught.value.refused.message
    assert seen == []


async def test_a_published_message_says_whether_its_sender_speaks_json(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    seen: list[tuple[Echo, bool]] = []
    await one.subscribe(f"t.{unique}.*", Echo, lambda msg, call: seen.append((msg, call.json)))
    await two.publish(f"t.{unique}.x", Echo(text="é", number=1), json=True)
    await two.publish(f"t.{unique}.x", Echo(text="é", number=2))
    await until(lambda: len(seen) == 2)
    assert seen == [(Echo(text="é", number=1), True), (Echo(text="é", number=2), False)]


async def test_a_queue_group_hears_each_message_once_and_no_group_hears_it_everywhere(
    bus_pair: BusPair, unique: str
) -> None:
    two = bus_pair[1]
    grouped: list[int] = []
    everywhere: list[int] = []
    for bus in bus_pair:
        await serve(bus, f"t.{unique}.e", lambda msg, call: everywhere.append(msg.number))

        def hear(msg: Echo, call: Call) -> None:
            grouped.append(msg.number)

        await serve(bus, f"t.{unique}.g", hear, "tests")
        await bus.subscribe(f"t.{unique}.g", Echo, hear, queue="others")
    for number in range(100):
        await two.publish(f"t.{unique}.g", Echo(text="", number=number))
        await two.publish(f"t.{unique}.e", Echo(text="", number=number))
    await until(lambda: len(grouped) >= 200 and len(everywhere) >= 200)
    await two.flush(WITHIN_S)
    assert sorted(grouped) == sorted([*range(100)] * 2), "once in each of the two groups"
    assert sorted(everywhere) == sorted([*range(100)] * 2), "once at each of the two instances"


async def test_stopping_hands_over_what_was_received_and_touches_no_other_service(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    replies, seen = Replies(), list[int]()
    await serve(one, f"t.{unique}.o", lambda msg, call: replies.later(call, msg), "q")
    mine = await serve(one, f"t.{unique}.m", lambda msg, call: seen.append(msg.number), "q")
    for number in range(200):
        await two.publish(f"t.{unique}.m", Echo(text="", number=number))
    await two.flush(WITHIN_S)
    await mine.stop()
    assert seen == list(range(200))
    with pytest.raises(NoResponders):
        await two.request(f"t.{unique}.m", Echo(text=""), Echo, timeout_s=WITHIN_S)
    here = Echo(text="still here")
    assert await two.request(f"t.{unique}.o", here, Echo, timeout_s=WITHIN_S) == here
    await replies.done()


# ---------------------------------------------------------------- keys


async def test_a_key_is_created_once_and_updated_by_compare_and_set(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    key = f"s.{unique}"
    assert await one.requests.get(key) is None
    first = await one.requests.create(key, b"a")
    with pytest.raises(WrongSequence) as caught:
        await two.requests.create(key, b"b")
    assert caught.value.last_seq in (None, first)
    second = await two.requests.update(key, b"c", first)
    assert second > first
    with pytest.raises(WrongSequence):
        await one.requests.update(key, b"d", first)
    entry = await one.requests.get(key)
    assert entry is not None
    assert (entry.value, entry.revision) == (b"c", second)


async def test_a_deleted_key_is_absent_and_may_be_created_again(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    key = f"s.{unique}"
    first = await one.requests.create(key, b"a")
    await one.requests.delete(key)
    await two.requests.delete(f"s.{unique}.never")
    assert await two.requests.get(key) is None
    with pytest.raises(WrongSequence):
        await two.requests.update(key, b"b", first)
    second = await two.requests.create(key, b"c")
    assert second > first
    with pytest.raises(WrongSequence):
        await one.requests.create(key, b"d")


async def updated_in_time(bus: Bus, key: str) -> str:
    """A key created with the shortest time to live and updated without one, before it ran out."""
    for n in range(TRIES):
        revision = await bus.requests.create(f"{key}.{n}", b"a", ttl_s=1.0)
        with contextlib.suppress(WrongSequence):  # the machine was too slow
            await bus.requests.update(f"{key}.{n}", b"b", revision)
            return f"{key}.{n}"
    raise AssertionError(f"{TRIES} keys ran out before they could be updated")


async def test_a_time_to_live_given_on_update_ends_the_key_which_may_then_be_created_again(
    bus_pair: BusPair, unique: str
) -> None:
    one, two = bus_pair
    ending = f"s.{unique}.ending"
    staying = await updated_in_time(one, f"s.{unique}.staying")
    await one.requests.update(ending, b"b", await one.requests.create(ending, b"a"), ttl_s=1.0)
    async with asyncio.timeout(WITHIN_S):
        while await two.requests.get(ending) is not None:
            await asyncio.sleep(0.05)
    assert await two.requests.get(staying) is not None, (
        "an update without a time to live takes the old one away"
    )
    await two.requests.create(ending, b"again")


async def renewed(bus_pair: BusPair, name: str) -> tuple[str, int, float]:
    """A lease held longer than it lives by itself: its key, its revision, when its last renewal was
    sent.

    Where the machine let a renewal come late, which is no fault of the lease, another is tried.
    """
    one, two = bus_pair
    clock, value = asyncio.get_running_loop().time, LeaseValue(holder="one").holder.encode()
    for n in range(TRIES):
        key, gaps_s, sent_at_s = f"{name}-{n}", list[float](), clock()
        revision: int | None = await one.leases.create(key, value)
        for _ in range(4):
            await asyncio.sleep(LEASE_TTL_S / 3)
            gaps_s.append(clock() - sent_at_s)
            sent_at_s = clock()
            try:
                revision = await one.leases.update(key, value, revision or 0)
            except WrongSequence:
                revision = None
                break
        lives = revision is not None and await two.leases.get(key) is not None
        gaps_s.append(clock() - sent_at_s)
        if lives and revision is not None:
            return key, revision, sent_at_s
        assert max(gaps_s) > 0.9 * LEASE_TTL_S, (
            f"{key} ran out though it was renewed after {gaps_s}"
        )
    raise AssertionError(f"this machine kept no lease alive in {TRIES} tries")


async def test_a_lease_lives_while_it_is_renewed_and_then_runs_out(
    bus_pair: BusPair, unique: str
) -> None:
    two, clock = bus_pair[1], asyncio.get_running_loop().time
    key, revision, renewed_at_s = await renewed(bus_pair, f"replica.{unique}")
    async with asyncio.timeout(WITHIN_S):
        while await two.leases.get(key) is not None:
            await asyncio.sleep(0.05)
    assert clock() - renewed_at_s > LEASE_TTL_S - 0.2
    assert await two.leases.create(key, b"two") > revision, "epochs never fall"


async def test_a_scan_of_thousands_of_keys_misses_none(bus_pair: BusPair, unique: str) -> None:
    keys = [f"s.{unique}.{n}" for n in range(2500)]
    for start in range(0, len(keys), 500):
        some = keys[start : start + 500]
        await asyncio.gather(*(bus_pair[0].requests.create(key, b"x" * 200) for key in some))
    found = await bus_pair[1].requests.scan(f"s.{unique}.")
    assert sorted(key for key, _ in found) == sorted(keys)


# ---------------------------------------------------------------- the log


@pytest_asyncio.fixture
async def logs(bus_pair: BusPair, unique: str) -> tuple[str, str]:
    """The subjects of two logs that no other test has."""
    replicas = (ReplicaId(unique), ReplicaId(f"{unique}-other"))
    if isinstance(bus_pair[0], NatsBus):
        await bus_pair[0].make_streams(replicas)
    return ack_log(replicas[0]), ack_log(replicas[1])


async def test_of_two_who_append_after_the_same_entry_exactly_one_wins(
    bus_pair: BusPair, logs: tuple[str, str]
) -> None:
    subject, _ = logs

    async def attempt(bus: Bus, expected_last: int) -> int | None:
        try:
            return await bus.acks.append(subject, b"entry", expected_last)
        except WrongSequence:
            return None

    last = 0
    for _ in range(5):
        tried = await asyncio.gather(*(attempt(bus, last) for bus in bus_pair))
        won = [seq for seq in tried if seq is not None]
        assert len(won) == 1
        assert won[0] > last
        last = won[0]
    assert len(await bus_pair[0].acks.read(subject)) == 5


async def test_the_log_gives_its_last_entry_and_all_after_one(
    bus_pair: BusPair, logs: tuple[str, str]
) -> None:
    one, two = bus_pair
    subject, other = logs
    assert await two.acks.last(subject) is None
    assert list(await two.acks.read(subject)) == []
    written: list[tuple[int, bytes]] = []
    last = other_last = 0
    for n in range(20):
        last = await one.acks.append(subject, str(n).encode(), last)
        other_last = await one.acks.append(other, b"", other_last)
        written.append((last, str(n).encode()))
    assert await two.acks.last(subject) == written[-1]
    assert list(await two.acks.read(subject)) == written
    assert list(await two.acks.read(subject, written[6][0])) == written[7:]
    assert list(await two.acks.read(subject, last)) == []


async def test_trimming_forgets_only_what_lies_below(
    bus_pair: BusPair, logs: tuple[str, str]
) -> None:
    one, two = bus_pair
    subject, other = logs
    seqs, last = [], 0
    await one.acks.append(other, b"", 0)
    for _ in range(5):
        last = await one.acks.append(subject, b"", last)
        seqs.append(last)
    await two.acks.trim(subject, seqs[3])
    await two.acks.trim(subject, 0)
    assert [seq for seq, _ in await two.acks.read(subject)] == seqs[3:]
    assert len(await two.acks.read(other)) == 1
    assert await one.acks.append(subject, b"", last) > last
