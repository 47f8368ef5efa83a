"""Giving a request to a replica, and taking it back: the steps that admission and relegation share.

A worker takes a request in only if the record names that place, and an offer in doubt is withdrawn
at the worker (or the replica fenced) before the request goes elsewhere. So at any time at most one
attempt can speak to the client.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.admission import as_offer
from shared.errors import BusError, BusTimeout, NoResponders, PeerError
from shared.process import conventions as names
from shared.process.telemetry import TRACEPARENT, AttributeValue, Tracing
from shared.schemas import AttemptOver, OfferAnswer, Record, Status, Withdraw, Withdrawn
from shared.store.records import Records, Stored
from shared.vocabulary import RequestKey, ServiceClass

OFFER_TIMEOUT_S = 2.0  # longer than a hold may take
WITHDRAW_TIMEOUT_S = 2.0  # longer than an iteration


@dataclass(frozen=True, slots=True)
class Placed:
    """How an attempt to place went: held there, or declined (for certain), or no longer ours to
    place.
    """

    taken: bool
    gone: bool = False
    unplanned: bool = False
    earliest_s: float | None = None
    stored: Stored | None = None


class Placer:
    """The steps of placing, on behalf of one service."""

    def __init__(self, bus: Bus, records: Records, clock: Clock, tracing: Tracing) -> None:
        self._bus, self._records = bus, records
        self._clock, self._tracing = clock, tracing

    async def place(
        self,
        key: RequestKey,
        step: Callable[[Record], Record | None],
    ) -> Placed:
        """Write the place by `step` (`placed` or `drawn` of shared/core/record.py), then offer."""
        stored = await self._records.change(key, step)
        if stored is None:
            return Placed(taken=False, gone=True)
        return await self.offer(stored)

    async def offer(self, stored: Stored) -> Placed:
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
            answer = await self._bus.request(
                subjects.offer(record.replica),
                offer,
                OfferAnswer,
                timeout_s=OFFER_TIMEOUT_S,
                headers=headers,
            )
        except NoResponders:
            answer = OfferAnswer(accepted=False, reason="nobody plans that replica", ready=False)
        except (BusError, PeerError) as error:
            answer = OfferAnswer(accepted=False, reason=str(error), in_doubt=True)
        if record.traceparent:
            attributes: dict[str, AttributeValue] = {
                names.MESSAGING_SYSTEM: names.NATS,
                names.REPLICA: record.replica,
                names.ATTEMPT: record.attempt,
                names.SERVICE_CLASS: record.service_class.value,
                "slackline.accepted": answer.accepted,
                "slackline.reason": answer.reason,
            }
            self._tracing.record(
                "place", record.traceparent, began, self._clock.unix_s(), attributes
            )
        return answer

    async def conclude(self, stored: Stored, answer: OfferAnswer) -> Placed:
        """What follows from the answer for a record that is stored."""
        record = stored.record
        if answer.accepted:
            await self.tell(
                record,
                "accepted" if record.service_class is ServiceClass.STANDARD else "relegated",
                "",
            )
            return Placed(taken=True, stored=stored)
        if answer.in_doubt:
            return await self._in_doubt(stored)
        return Placed(
            taken=False, unplanned=not answer.ready, earliest_s=answer.earliest_s, stored=stored
        )

    async def _in_doubt(self, stored: Stored) -> Placed:
        """Nobody knows whether the worker holds it: take it back for certain."""
        over = await self.withdraw(stored.record)
        if over is None:
            return Placed(taken=False, stored=stored)
        # It was held, and may have spoken: its end is handled where all ends are.
        return Placed(taken=False, gone=True, stored=stored)

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
