"""Tests of the replica planner, which keeps one replica's schedule: its inbox, and what ends it."""

import asyncio
from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from services.planner import replica_planner as planners
from services.planner.config import PlannerConfig
from services.planner.metrics import PlannerMetrics
from services.planner.replica_planner import ReplicaPlanner, StaleEpoch
from services.planner.resync_check import misreported
from services.planner.service import Planner
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.columns import pack
from shared.core.announced import profile_of
from shared.core.replica.events import (
    Acked,
    Answer,
    HoldDone,
    NeedResync,
    Offered,
    ReplicaEvent,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.policy import registry
from shared.process.audit import IDLE_S
from shared.schemas import (
    Offer,
    OfferAccepted,
    OfferDeclined,
    PlanRefused,
    Resync,
    ResyncEntry,
    ResyncPage,
)
from shared.store.leases import Lease
from shared.store.presence import Absences
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import ReplicaId
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimBus, SimNet
from tests.simulated.virtual_loop import run_virtual, virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

R = ReplicaId("r")
ANNOUNCE = made.announce(R, max_slots=4)
ACK = made.ack(replica=R)


def offer(n: int) -> Offer:
    return made.offer(f"a.{n}", next_due_unix_s=1e12, expires_unix_s=1e12)


class Asked:
    """A message that wants an answer, and the answers it has had."""

    subject, headers, json = "", dict[str, str](), False
    payload_bytes = 0

    def __init__(self) -> None:
        self.answers: list[object] = []

    async def reply(self, msg: object) -> None:
        self.answers.append(msg)


async def a_seat() -> tuple[ReplicaPlanner, SimBus]:
    """A replica planner that holds its replica's lease, and the bus connection of the worker."""
    net = SimNet(Random(1), Faults())
    bus = net.connect("planner")
    lease = Lease(bus.leases, "planner.r", "p", Absences(bus, net.clock))
    assert await lease.acquire()
    cfg = PlannerConfig(policy="fcfs")
    planner = ReplicaPlanner(
        cfg, "p", bus, net.clock, lease, ANNOUNCE, Tracing(), PlannerMetrics(Registry())
    )
    return planner, net.connect("worker")


async def answer_resyncs(worker: SimBus, page_of: Callable[[Resync], ResyncPage]) -> None:
    """Answer as the worker, with these pages, when the planner asks what the worker holds."""

    def answer(resync: Resync, call: Call) -> None:
        replies.append(asyncio.ensure_future(call.reply(page_of(resync))))

    replies: list[asyncio.Future[None]] = []
    await worker.serve("worker", [Endpoint("resync", subjects.resync(R), Resync, answer)], {})


async def run_for(planner: ReplicaPlanner, seconds: float) -> None:
    running = asyncio.create_task(planner.run())
    await asyncio.sleep(seconds)
    running.cancel()


@virtual()
async def test_a_burst_of_offers_reaches_the_policy_as_one(monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []
    planner, _ = await a_seat()
    handle = planner.core.handle

    def counted(event: ReplicaEvent, *, now_unix_s: float) -> object:
        if isinstance(event, Offered):
            sizes.append(len(event.offers))
        return handle(event, now_unix_s=now_unix_s)

    monkeypatch.setattr(planner.core, "handle", counted)
    running = asyncio.create_task(planner.run())
    await asyncio.sleep(0.1)
    for n in range(100):  # on one connection, as where one admission places a burst
        planner._on_offer(offer(n), Asked())
    await asyncio.sleep(0.1)
    running.cancel()
    assert sizes == [100]


def test_a_full_inbox_declines_offers_and_still_takes_the_answers_to_holds(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(planners, "INBOX_LIMIT", 5)

    async def main() -> list[object]:
        planner, _ = await a_seat()
        asked = [Asked() for _ in range(8)]
        async with planner._chores:
            for n, call in enumerate(asked):
                planner._on_offer(offer(n), call)
        assert len(planner._waiting) == 5
        return [answer for call in asked for answer in call.answers]

    declined = OfferDeclined(reason="the planner is overloaded")
    assert run_virtual(main()) == [declined] * 3


@virtual()
async def test_a_higher_epoch_seen_at_the_worker_ends_the_seat():
    planner, worker = await a_seat()
    running = asyncio.create_task(planner.run())
    await asyncio.sleep(0.1)
    refused = PlanRefused(incarnation="i", epoch=planner.epoch + 1, expected_seq=1, reason="stale")
    await worker.publish(subjects.plan_refused(R), refused)
    with pytest.raises(StaleEpoch, match="was seen on r"):
        await running


@virtual()
async def test_a_worker_that_reports_requests_without_end_is_not_believed():
    """Each page says that there are more; the replica planner keeps none beyond the slots, and asks
    anew.
    """
    asked: list[int] = []

    def page_of(resync: Resync) -> ResyncPage:
        asked.append(resync.page)
        slot = resync.page % ANNOUNCE.max_slots
        entry = ResyncEntry(
            slot=slot, offer=offer(resync.page), computed_tokens=0, generated_tokens=0
        )
        return ResyncPage(announce=ANNOUNCE, next_seq=1, ack_seq=0, entries=[entry], more=True)

    planner, worker = await a_seat()
    await answer_resyncs(worker, page_of)
    await run_for(planner, 1.0)
    assert not planner.core.synced
    assert asked[:6] == [0, 1, 2, 3, 4, 0]
    assert max(asked) == ANNOUNCE.max_slots


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([(4, 10, 0, 0)], "a slot that it does not have"),
        ([(0, 10, 0, 0), (0, 10, 0, 0)], "two requests in one slot"),
        ([(0, 2**31 - 1, 1, 0)], "more tokens than its context"),
        ([(0, 10, 2, 12)], "more computed than is known"),
        ([(0, 10, 10, 19)], "a request whose tokens are all made"),
        ([(3, 10, 0, 10), (1, 10, 9, 18), (2, 991, 9, 0)], ""),
    ],
)
def test_a_worker_that_reports_what_it_cannot_hold_is_not_believed(
    entries: list[tuple[int, int, int, int]], reason: str
) -> None:
    """Each of these ended the replica planner, or was never planned."""
    found = [
        ResyncEntry(
            slot=slot,
            offer=replace(offer(n), prompt_tokens=prompt),
            generated_tokens=made,
            computed_tokens=computed,
        )
        for n, (slot, prompt, made, computed) in enumerate(entries)
    ]
    assert misreported(ANNOUNCE, found) == reason


@virtual()
async def test_a_seat_takes_over_what_the_worker_says_that_requests_share() -> None:
    entries = [
        ResyncEntry(
            slot=slot,
            offer=replace(offer(slot), prompt_tokens=90, generated_tokens=2),
            generated_tokens=2,
            computed_tokens=91,
            draft_tokens=91,
        )
        for slot in range(2)
    ]
    page = ResyncPage(
        announce=replace(ANNOUNCE, draft_kv_blocks=50), next_seq=1, ack_seq=0,
        entries=entries, more=False, shared_blocks=5, draft_shared_blocks=4,
    )  # fmt: skip
    planner, worker = await a_seat()
    await answer_resyncs(worker, lambda _: page)
    await run_for(planner, 0.1)
    table = planner.core._table
    assert (table.kv.shared, table.draft_kv.shared) == (5, 4)


def test_a_worker_that_goes_on_with_what_should_have_ended_is_asked_what_it_holds() -> None:
    """Its request has made all the tokens of the offer, and its end does not come."""
    core = ReplicaCore(registry.make("fcfs", {}), profile_of(ANNOUNCE), epoch=1)
    core.handle(Synced(ANNOUNCE, 1, 1, 0, []), now_unix_s=0.0)
    asked = replace(offer(0), max_tokens=1)
    (hold,) = core.handle(Offered([asked]), now_unix_s=0.0)
    assert isinstance(hold, SendHold)
    core.handle(HoldDone(hold.hold.slot, OfferAccepted()), now_unix_s=0.0)
    (sent,) = core.handle(Tick(), now_unix_s=0.0)
    assert isinstance(sent, SendPlan)
    ran = replace(ACK, slots=pack([0]), computed=pack([10]), emitted=pack([1]), exec_s=0.01)
    assert [type(one) for one in core.handle(Acked(ran), now_unix_s=0.01)] == [NeedResync]


def test_an_offer_of_which_nothing_is_left_is_declined() -> None:
    core = ReplicaCore(registry.make("fcfs", {}), profile_of(ANNOUNCE), epoch=1)
    core.handle(Synced(ANNOUNCE, 1, 1, 0, []), now_unix_s=0.0)
    whole = replace(offer(0), generated_tokens=10)
    (answer,) = core.handle(Offered([whole]), now_unix_s=0.0)
    assert isinstance(answer, Answer) and isinstance(answer.answer, OfferDeclined)


@virtual()
async def test_books_that_do_not_balance_end_the_seat_and_leave_the_replica_to_others():
    net = SimNet(Random(1), Faults())
    planner = Planner(
        PlannerConfig(policy="fcfs"), net.connect("planner"), net.clock, Tracing(), Random(2)
    )
    worker, stop = net.connect("worker"), asyncio.Event()
    running = asyncio.create_task(planner.run(stop))

    async def announce(seconds: float) -> None:
        for _ in range(int(seconds * 4)):
            await worker.publish(subjects.announce(R), ANNOUNCE)
            await asyncio.sleep(0.25)

    await announce(2.0)
    core = planner._planners[R].core
    core._desk.slots.give_back(0)
    core._desk.slots.retire(0, 1)  # the slot is free and is not
    assert list(planner._planners) == [R]
    await announce(IDLE_S)
    stop.set()
    await running
    assert [type(error) for error in planner.broken] == [ExceptionGroup]
    assert list(planner._shunned) == [R]
