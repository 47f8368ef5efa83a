"""The relegation service: places the best-effort pool's requests. One instance acts, by lease."""

import asyncio
from contextlib import suppress
from random import Random
from typing import assert_never

import structlog

from services.relegation.config import RelegationConfig
from services.relegation.scaling import Scaling
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.core.record import record as life
from shared.core.relegation.relegation import (
    Declined,
    Expire,
    Gone,
    Heard,
    Listed,
    Place,
    Queued,
    RelegationAction,
    RelegationCore,
    RelegationEvent,
    RelegationSettings,
    Taken,
    Told,
)
from shared.errors import BusError, PeerError
from shared.placing.ending import Ending
from shared.placing.lacking import ask_for_lacking
from shared.placing.outcomes import MODEL_LIMIT, Outcomes
from shared.placing.place import OfferMetrics, Placer
from shared.process.chores import Chores
from shared.process.drive import Inbox, drive
from shared.schemas import Digest, Hint, OfferAccepted, OfferDeclined, PoolDigest
from shared.store.leases import Leader, Lease
from shared.store.presence import Absences, be_present
from shared.store.records import Records
from shared.store.usage import Usage
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import RecordState, RequestKey

log = structlog.get_logger()

KEY = "relegation"
TELL_S = 0.25  # between two digests of the pool
# A second of digests of 256 replicas (10/s each) and of hints at 1000/s, rounded up. What finds it
# full is lost: another digest and another listing follow.
INBOX_LIMIT = 4096


class Relegation:
    """One instance of relegation; it acts only while it holds the lease."""

    def __init__(
        self, cfg: RelegationConfig, bus: Bus, clock: Clock, tracing: Tracing, rng: Random
    ) -> None:
        self._cfg, self._bus, self._clock = cfg, bus, clock
        self.name = f"relegation-{rng.getrandbits(48):012x}"
        self._records = Records(bus.requests, bus.bodies)
        self.metrics = Registry()
        self._models: set[str] = set()  # of the fleet, by its digests
        outcomes = Outcomes(self.metrics, lambda: self._models)
        self._usage = Usage(bus.usage, self.name)
        self._ending = Ending(bus, self._records, tracing, outcomes, self._usage)
        self._placer = Placer(bus, self._records, clock, tracing, OfferMetrics(self.metrics))
        self._backlog = Backlog(self.metrics)
        self._scaling = Scaling(
            bus, clock, cfg.warm_up_s, self.metrics, lambda: self._driver is not None
        )
        lease = Lease(bus.leases, KEY, self.name, Absences(bus, clock))
        self._leader = Leader(lease, clock)
        self._chores = Chores()
        # these three belong to one term of the lease; without the lease nothing drives the core
        self.core = self._empty()
        self._inbox: Inbox[RelegationEvent] = Inbox(INBOX_LIMIT)
        self._driver: asyncio.Task[None] | None = None

    def _empty(self) -> RelegationCore:
        return RelegationCore(
            RelegationSettings(
                per_digest=self._cfg.per_digest, promote_margin=self._cfg.promote_margin
            )
        )

    async def run(self, stop: asyncio.Event) -> None:
        async with self._chores as chores:
            digests = chores.listen(
                await self._bus.subscribe(subjects.DIGESTS, Digest, self._on_digest)
            )
            hints = Endpoint("hints", subjects.RELEGATED, Hint, self._on_hint)
            chores.listen(await self._bus.serve("relegation", [hints], {"instance": self.name}))
            chores.listen(await be_present(self._bus, self.name))
            await self._scaling.listen(chores)
            hold = chores.start(self._hold(), name="relegation.hold")
            scaling = chores.start(self._scaling.run(), name="relegation.scaling")
            telling = chores.start(self._tell(), name="relegation.tell")
            asking = chores.start(
                ask_for_lacking(
                    self._bus,
                    lambda: self.core.lacking,
                    lambda *told: self._inbox.offer(Told(*told)),
                ),
                name="relegation.prefixes",
            )
            summing = chores.start(self._usage.run(), name="relegation.usage")
            log.info("relegation.ready", instance=self.name)
            await stop.wait()
            hold.cancel()
            telling.cancel()
            scaling.cancel()
            asking.cancel()
            summing.cancel()
            await digests.stop()  # nothing more is handed out
            self._inbox.drain()
            if self._driver is not None:
                await asyncio.wait((self._driver,), timeout=self._cfg.drain_s)
                self._driver.cancel()
            await self._leader.resign()
        await self._usage.store()

    async def _hold(self) -> None:
        """Wait for the lease; while holding it, list the records every `list_s`."""
        listed = 0.0
        while True:
            now = self._clock.unix_s()
            if await self._leader.look():
                log.info("relegation.leads", instance=self.name)
                listed = 0.0
                self._lead()
            if not self._leader.leads:
                self._stand_by()
            elif now - listed >= self._cfg.list_s:
                try:
                    if await self._list():
                        listed = now
                except BusError:
                    log.warning("listing.broken", instance=self.name)
            await asyncio.sleep(self._leader.pause_s)

    def _lead(self) -> None:
        """Begin a term with an empty pool; the listing fills it."""
        self._stand_by()
        self.core, self._inbox = self._empty(), Inbox(INBOX_LIMIT)
        self._driver = self._chores.start(
            drive(self.core, self._inbox, self._begin, self._clock, name="relegation"),
            "relegation.drive",
        )

    def _stand_by(self) -> None:
        """Stop deciding; steps under way end by themselves."""
        if self._driver is not None:
            self._driver.cancel()
            self._driver = None
            self._backlog.show(None)

    async def _tell(self) -> None:
        """Tell the admissions how much waits, while this instance leads."""
        while True:
            if self._driver is not None:
                digest = self.core.digest(now_unix_s=self._clock.unix_s())
                self._backlog.show(digest)
                with suppress(BusError):  # another follows
                    await self._bus.publish(subjects.POOL, digest)
            await asyncio.sleep(TELL_S)

    async def _list(self) -> bool:
        """Feed the core every relegated record; False if its inbox was full."""
        await self._records.tidy()
        records = [
            stored.record
            for stored in await self._records.open()
            if stored.record.state == RecordState.RELEGATED
        ]
        for record in records:
            if record.cancelled:
                self._chores.spawn(self._close(record.key), "relegation.cancelled")
        return self._inbox.offer(Listed(records))

    def _on_digest(self, digest: Digest, call: Call) -> None:
        if len(self._models) < MODEL_LIMIT:
            self._models.add(digest.model)
        self._scaling.heard(digest)
        if self._leader.leads:
            self._inbox.offer(Heard(digest))

    def _on_hint(self, hint: Hint, call: Call) -> None:
        if self._leader.leads:
            self._chores.spawn(self._look(hint.key), "relegation.look")

    async def _look(self, key: RequestKey) -> None:
        stored = await self._records.get(key)
        if stored is not None and stored.record.state == RecordState.RELEGATED:
            self._inbox.offer(Queued(stored.record))

    async def _begin(self, action: RelegationAction) -> None:
        self._chores.spawn(self._perform(action, self._inbox), "relegation.step")

    async def _perform(self, action: RelegationAction, inbox: Inbox[RelegationEvent]) -> None:
        """Take one step, and feed its result to the core of the term that asked for it."""
        try:
            match action:
                case Place():
                    inbox.put(await self._place(action))
                case Expire(key):
                    await self._ending.end(key, lambda r: life.expired(r, self._clock.unix_s()))
                    inbox.put(Gone(key))
                case _:
                    assert_never(action)
        except (BusError, PeerError) as error:
            log.warning("step.doubtful", request=action.key, error=str(error))
            inbox.put(Gone(action.key))  # the next listing, or admission's sweep, finds it

    async def _place(self, place: Place) -> Taken | Declined | Gone:
        stored = await self._records.change(
            place.key,
            lambda record: life.drawn(
                record,
                self.name,
                place.replica,
                place.incarnation,
                place.service_class,
                now_unix_s=self._clock.unix_s(),
            ),
        )
        answer = None if stored is None else await self._placer.offer(stored)
        if stored is None or answer is None:
            await self._close(place.key)
            return Gone(place.key)
        if isinstance(answer, OfferAccepted):
            return Taken(place.key)
        why = answer.reason if isinstance(answer, OfferDeclined) else "nobody plans it now"
        back = await self._back(place.key, stored.record.attempt, why)
        return Declined(place.key, place.replica) if back else Gone(place.key)

    async def _back(self, key: RequestKey, attempt: int, why: str) -> bool:
        """Put the request back into the pool: this attempt was declined, for certain."""
        stored = await self._records.change(
            key,
            lambda record: life.declined(
                record, self.name, attempt=attempt, now_unix_s=self._clock.unix_s(), why=why
            ),
        )
        if stored is not None and stored.record.cancelled:
            await self._close(key)
            return False
        return stored is not None

    async def _close(self, key: RequestKey) -> None:
        """End a request that was cancelled and that no replica has."""
        await self._ending.end(key, lambda record: life.closed(record, self._clock.unix_s()))


class Backlog:
    """The metrics of the pool: the work that waits, and the time that the fleet needs for it."""

    def __init__(self, metrics: Registry) -> None:
        self._requests = metrics.gauge(
            names.POOL_REQUESTS, "Requests in the best-effort pool."
        ).labels()
        self._tokens = metrics.gauge(
            names.POOL_TOKENS, "Their work: prompt and longest output."
        ).labels()
        self._wait = metrics.gauge(
            names.POOL_WAIT, "Time that the fleet needs for it, at its speed of late."
        ).labels()

    def show(self, digest: PoolDigest | None) -> None:
        """Export the pool of `digest`, which is of the instance that leads; None: it is empty."""
        lanes = [] if digest is None else digest.lanes
        tokens = sum(lane.tokens for lane in lanes)
        self._requests.set(sum(lane.requests for lane in lanes))
        self._tokens.set(tokens)
        tokens_s = 0.0 if digest is None else digest.tokens_s
        self._wait.set(tokens / tokens_s if tokens and tokens_s else 0.0)
