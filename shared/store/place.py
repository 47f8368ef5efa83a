"""Giving a request to a replica, and taking it back: the steps that admission and relegation share.

A worker takes a request in only if the record names that place, and an offer in doubt is withdrawn
at the worker (or the replica fenced) before the request goes elsewhere. So at any time at most one
attempt can speak to the client.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import assert_never

from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.offer import as_offer
from shared.errors import BusError, BusTimeout, NoResponders, PeerError
from shared.process import conventions as names
from shared.process.telemetry import TRACEPARENT, AttributeValue, Tracing
from shared.schemas import (
    AttemptOver,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
    Record,
    Status,
    Withdraw,
    Withdrawn,
)
from shared.store.records import Records, Stored
from shared.vocabulary import RequestKey, ServiceClass

OFFER_TIMEOUT_S = 2.0  # longer than a hold may take
WITHDRAW_TIMEOUT_S = 2.0  # longer than an iteration


@dataclass(frozen=True, slots=True)
class PlaceHeld:
    """The replica holds the request."""


@dataclass(frozen=True, slots=True)
class PlaceDeclined:
    """The replica does not hold this attempt, for certain."""

    attempt: int
    earliest_s: float | None = None  # from now: when it could meet the SLO


@dataclass(frozen=True, slots=True)
class PlaceUnplanned:
    """Nobody plans that replica now, so nobody decided; it does not hold this attempt."""

    attempt: int


@dataclass(frozen=True, slots=True)
class PlaceGone:
    """The request is no longer ours to place: it ended, was cancelled, or another has it."""


PlaceOutcome = PlaceHeld | PlaceDeclined | PlaceUnplanned | PlaceGone


class Placer:
    """The steps of placing, on behalf of one service."""

    def __init__(self, bus: Bus, records: Records, clock: Clock, tracing: Tracing) -> None:
        self._bus, self._records = bus, records
        self._clock, self._tracing = clock, tracing

    async def place(
        self,
        key: RequestKey,
        step: Callable[[Record], Record | None],
    ) -> PlaceOutcome:
        """Write the place by `step` (`placed` or `drawn` of shared/core/record.py), then offer."""
        stored = await self._records.change(key, step)
        if stored is None:
            return PlaceGone()
        return await self.offer(stored)

    async def offer(self, stored: Stored) -> PlaceOutcome:
        """Offer an attempt whose record already names the place. Returns only when it is certain
        who has it.
        """
        return await self.conclude(stored, await self.ask(stored.record))

    async def ask(self, record: Record) -> OfferAnswer:
        """What the replica's planner says; it takes nothing in that its worker does not find in the
        store under this place.
        """
        assert record.replica is not None
        began = self._clock.unix_s()
        headers = {TRACEPARENT: record.traceparent} if record.traceparent else None
        offer = as_offer(record, record.service_class)
        try:
            answer: OfferAnswer = await self._bus.request(
                subjects.offer(record.replica),
                offer,
                OfferAnswer,
                timeout_s=OFFER_TIMEOUT_S,
                headers=headers,
            )
        except NoResponders:
            answer = OfferNotReady(reason="nobody plans that replica")
        except (BusError, PeerError) as error:
            answer = OfferInDoubt(reason=str(error))
        if record.traceparent:
            attributes: dict[str, AttributeValue] = {
                names.MESSAGING_SYSTEM: names.NATS,
                names.REPLICA: record.replica,
                names.ATTEMPT: record.attempt,
                names.SERVICE_CLASS: record.service_class.value,
                "slackline.accepted": isinstance(answer, OfferAccepted),
                "slackline.reason": answer.reason,
            }
            self._tracing.record(
                "place", record.traceparent, began, self._clock.unix_s(), attributes
            )
        return answer

    async def conclude(self, stored: Stored, answer: OfferAnswer) -> PlaceOutcome:
        """What follows from the answer for a record that is stored."""
        record = stored.record
        match answer:
            case OfferAccepted():
                standard = record.service_class is ServiceClass.STANDARD
                await self.tell(record, "accepted" if standard else "relegated", "")
                return PlaceHeld()
            case OfferDeclined():
                return PlaceDeclined(record.attempt, answer.earliest_s)
            case OfferNotReady():
                return PlaceUnplanned(record.attempt)
            case OfferInDoubt():
                return await self._in_doubt(record)
            case _:
                assert_never(answer)

    async def _in_doubt(self, record: Record) -> PlaceOutcome:
        """Nobody knows whether the worker holds it: take it back for certain."""
        over = await self.withdraw(record)
        # An attempt that was held may have spoken: its end is handled where all ends are.
        return PlaceDeclined(record.attempt) if over is None else PlaceGone()

    async def withdraw(self, record: Record) -> AttemptOver | None:
        """What the attempt made, None if it never came there and never will. Raises BusTimeout
        while the worker is silent.
        """
        assert record.replica is not None
        ask = Withdraw(key=record.key, attempt=record.attempt)
        try:
            answer = await self._bus.request(
                subjects.withdraw(record.replica), ask, Withdrawn, timeout_s=WITHDRAW_TIMEOUT_S
            )
        except (NoResponders, PeerError) as error:
            raise BusTimeout(f"the worker of {record.replica} does not answer") from error
        return answer.over

    async def tell(self, record: Record, state: str, reason: str) -> None:
        """An event to the client; it may be lost."""
        status = Status(
            state=state,
            service_class=record.service_class,
            attempt=record.attempt,
            replica=record.replica,
            reason=reason,
        )
        with suppress(BusError):
            await self._bus.publish(record.stream_subject, status, json=record.json)
