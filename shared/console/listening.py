"""A collector that listens on a bus, as long as a context lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from shared import subjects
from shared.bus.api import Bus, Call
from shared.clock import Clock
from shared.columns import pack
from shared.console.collector import Collector
from shared.errors import BusError, PeerError
from shared.rules.tiers import TierSet
from shared.schemas import (
    Announce,
    BatchPlan,
    Digest,
    Ended,
    PlanAck,
    PoolDigest,
    Roster,
    RosterAnswer,
)
from shared.vocabulary import ReplicaId

LOOK_S = 0.1  # between two looks for questions to planners
ANSWER_S = 1.0  # a planner answers between two steps


@asynccontextmanager
async def listening(bus: Bus, clock: Clock, tiers: TierSet | None) -> AsyncIterator[Collector]:
    """A collector that hears the fleet while the context is open. Raises BusError."""
    collector = Collector(clock.unix_s(), tiers)
    now = clock.unix_s

    def on_digest(digest: Digest, _: Call) -> None:
        collector.hear_digest(digest, now())

    def on_announce(announce: Announce, _: Call) -> None:
        collector.hear_announce(announce)

    def on_plan(plan: BatchPlan, _: Call) -> None:
        collector.hear_plan(plan)

    def on_ack(ack: PlanAck, _: Call) -> None:
        collector.hear_ack(ack, now())

    def on_ended(ended: Ended, _: Call) -> None:
        collector.hear_ended(ended, now())

    def on_pool(pool: PoolDigest, _: Call) -> None:
        collector.hear_pool(pool)

    heard: list[tuple[str, Any, Any]] = [
        (subjects.ENDED, Ended, on_ended),
        (subjects.PLANS, BatchPlan, on_plan),
        (subjects.ACKS, PlanAck, on_ack),
        (subjects.DIGESTS, Digest, on_digest),
        (subjects.ANNOUNCEMENTS, Announce, on_announce),
        (subjects.POOL, PoolDigest, on_pool),
    ]
    async with AsyncExitStack() as stack:
        for subject, kind, handler in heard:
            subscription = await bus.subscribe(subject, kind, handler)
            stack.push_async_callback(subscription.stop)
        asking = asyncio.create_task(_ask(bus, clock, collector), name="console.ask")
        try:
            yield collector
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


async def _ask(bus: Bus, clock: Clock, collector: Collector) -> None:
    """Ask planners for the requests that the collector does not know."""

    async def one(replica: ReplicaId, slots: list[int]) -> None:
        try:
            answer = await bus.request(
                subjects.roster(replica),
                Roster(slots=pack(slots)),
                RosterAnswer,
                timeout_s=ANSWER_S,
            )
        except (BusError, PeerError):
            return  # it is asked again
        collector.hear_roster(replica, slots, answer, clock.unix_s())

    while True:
        await asyncio.gather(*(one(*question) for question in collector.questions(clock.unix_s())))
        await asyncio.sleep(LOOK_S)
