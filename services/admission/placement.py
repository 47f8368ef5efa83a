"""Carries out the steps that admission's core asks for, and feeds their results back."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import assert_never

import structlog

from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.admission.admission import (
    AdmissionAction,
    AdmissionEvent,
    Answered,
    Gone,
    Lost,
    Opened,
    Place,
    Refuse,
    Relegate,
)
from shared.core.record import record as life
from shared.errors import BusError, PeerError
from shared.placing.ending import Ending
from shared.placing.place import Placer
from shared.process.chores import Chores
from shared.process.drive import Inbox
from shared.process.logs import traced
from shared.schemas import CertainAnswer, Hint, OfferAccepted, OfferAnswer, Record, Refused
from shared.store.records import Records, Stored
from shared.vocabulary import ReplicaId, RequestKey

log = structlog.get_logger()

# A second of digests of 256 replicas (10/s each) and the 1000 requests of a lost replica, rounded
# up. A digest that finds it full is dropped: another follows. The sweep finds a dropped record.
INBOX_LIMIT = 4096
TELL_S = 1.0  # the longest that a client waits to hear whether its request is refused


class Placement:
    """Places open requests on replicas. `soon` asks for a sweep, which finishes steps in doubt."""

    def __init__(
        self,
        owner: str,
        bus: Bus,
        clock: Clock,
        records: Records,
        placer: Placer,
        ending: Ending,
        chores: Chores,
        soon: Callable[[], None],
    ) -> None:
        self._owner, self._bus, self._clock, self._records = owner, bus, clock, records
        self._placer, self._ending, self._chores, self._soon = placer, ending, chores, soon
        self.inbox: Inbox[AdmissionEvent] = Inbox(INBOX_LIMIT)
        # requests whose clients wait for the decision
        self._untold: dict[RequestKey, asyncio.Future[Refused | None]] = {}

    @property
    def idle(self) -> bool:
        """True if no client waits to hear whether its request is refused."""
        return not self._untold

    async def decision(self, key: RequestKey) -> Refused | None:
        """The refusal of a request; None: it goes on, or nothing is decided after TELL_S."""
        decided: asyncio.Future[Refused | None] = asyncio.get_running_loop().create_future()
        self._untold[key] = decided
        try:
            async with asyncio.timeout(TELL_S):
                return await decided
        except TimeoutError:
            return None
        finally:
            del self._untold[key]

    async def end_cancelled(self, key: RequestKey) -> None:
        """End a cancelled request that no replica holds."""
        await self._ending.end(key, lambda record: life.closed(record, self._clock.unix_s()))

    def feed(self, event: AdmissionEvent) -> None:
        if isinstance(event, Answered | Gone | Lost):
            self.inbox.put(event)  # bounded: one per step under way, one per replica
        elif not self.inbox.offer(event) and isinstance(event, Opened):
            self._soon()

    async def begin(self, action: AdmissionAction) -> None:
        self._chores.spawn(self._perform(action), "admission.step")

    async def _perform(self, action: AdmissionAction) -> None:
        try:
            match action:
                case Place(key, attempt, replica, incarnation, hops_left, declined, apart):
                    stored = await self._records.change(
                        key,
                        lambda record: life.placed(
                            record,
                            self._owner,
                            replica,
                            incarnation,
                            attempt=attempt,
                            apart=apart,
                            now_unix_s=self._clock.unix_s(),
                            declined=declined,
                        ),
                    )
                    answer = (
                        None
                        if stored is None
                        else await self._placer.offer(stored, hops_left=hops_left)
                    )
                    self._placed(key, attempt + 1, replica, answer)
                case Relegate(key):
                    await self._relegate(action)
                    self._decided(key)
                    self.feed(Gone(key))
                case Refuse(key, reason, retry_after_s, declined):
                    ended = await self._ending.end(
                        key,
                        lambda record: life.refused(
                            record,
                            self._owner,
                            self._clock.unix_s(),
                            message=reason,
                            retry_after_s=retry_after_s,
                            declined=declined,
                        ),
                    )
                    # where it is another's by now, it goes on: its client hears of its end
                    refused = None if ended is None else slow_down(reason, retry_after_s)
                    self._decided(key, refused)
                    self.feed(Gone(key))
                case _:
                    assert_never(action)
        except (BusError, PeerError) as error:
            # The record says how far it came, and the sweep goes on; not with a damaged one.
            log.warning("step.doubtful", request=action.key, error=str(error))
            self.feed(Gone(action.key))
            self._soon()

    def _placed(
        self, key: RequestKey, attempt: int, replica: ReplicaId, answer: CertainAnswer | None
    ) -> None:
        if answer is None:
            self._decided(key)
            self.feed(Gone(key))
            self._soon()  # if it is ours after all, that finds it
            self._chores.spawn(self.end_cancelled(key), "admission.cancelled")
            return
        if isinstance(answer, OfferAccepted):
            self._decided(key)
        self.feed(Answered(key, attempt, replica, answer))

    async def _relegate(self, relegate: Relegate) -> None:
        stored = await self._records.change(
            relegate.key,
            lambda record: life.relegated(
                record,
                self._owner,
                now_unix_s=self._clock.unix_s(),
                why=relegate.reason,
                declined=relegate.declined,
                neighbours=relegate.neighbours,
            ),
        )
        if stored is None:
            await self.end_cancelled(relegate.key)
            return
        await self.announce_relegated(stored.record, relegate.reason)

    async def announce_relegated(self, record: Record, reason: str) -> None:
        await self._placer.publish_status(record, "relegated", reason)
        with suppress(BusError):  # the next listing finds it
            await self._bus.publish(subjects.RELEGATED, Hint(key=record.key))

    async def conclude(self, stored: Stored, answer: asyncio.Task[OfferAnswer]) -> None:
        record = stored.record
        assert record.replica is not None
        try:
            self._placed(
                record.key,
                record.attempt,
                record.replica,
                await self._placer.conclude(stored, await answer),
            )
        except BusError as error:
            with traced(record.traceparent):
                log.warning("step.doubtful", request=record.key, error=str(error))
            self.feed(Gone(record.key))
            self._soon()

    def _decided(self, key: RequestKey, refused: Refused | None = None) -> None:
        decided = self._untold.get(key)
        if decided is not None and not decided.done():
            decided.set_result(refused)


def slow_down(message: str, retry_after_s: float) -> Refused:
    """The refusal of a request with which nothing is wrong, but for which there is no room now."""
    return Refused(code="slow_down", message=message, retry_after_s=retry_after_s)
