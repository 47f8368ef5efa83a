"""Lets the console's collector hear a fleet's messages, for as long as a context lasts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from shared import subjects
from shared.bus.api import Bus, Handler
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
    ReplicasNeeded,
    Roster,
    RosterAnswer,
)
from shared.vocabulary import ReplicaId

LOOK_S = 0.1  # between two looks for questions to planners
ANSWER_S = 1.0  # the longest wait: a planner answers between two of its steps


@asynccontextmanager
async def listening(bus: Bus, clock: Clock, tiers: TierSet | None) -> AsyncIterator[Collector]:
    """A collector that hears the fleet while the context is open. Raises BusError."""
    collector = Collector(clock.unix_s(), tiers)
    now = clock.unix_s
    heard: list[tuple[str, Any, Handler]] = [
        (subjects.ENDED, Ended, lambda ended, _: collector.hear_ended(ended, now())),
        (subjects.PLANS, BatchPlan, lambda plan, _: collector.hear_plan(plan)),
        (subjects.ACKS, PlanAck, lambda ack, _: collector.hear_ack(ack, now())),
        (subjects.DIGESTS, Digest, lambda digest, _: collector.hear_digest(digest, now())),
        (subjects.ANNOUNCEMENTS, Announce, lambda announce, _: collector.hear_announce(announce)),
        (subjects.POOL, PoolDigest, lambda pool, _: collector.hear_pool(pool)),
        (subjects.SCALING, ReplicasNeeded, lambda needed, _: collector.hear_needed(needed)),
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
            return  # the planner is asked again
        collector.hear_roster(replica, slots, answer, clock.unix_s())

    while True:
        await asyncio.gather(*(one(*question) for question in collector.questions(clock.unix_s())))
        await asyncio.sleep(LOOK_S)
