"""Placing a request at a replica, and taking it back, for admission and relegation. A worker takes
only what the record places there. An offer in doubt is withdrawn (or the replica fenced) before the
request goes elsewhere: one attempt at most can publish.
"""

from contextlib import suppress
from typing import assert_never

from shared import subjects
from shared.bus.api import Bus
from shared.clock import Clock
from shared.core.offer import as_offer
from shared.core.prefixes.fetching import fetch_most_s
from shared.errors import BusError, BusTimeout, NoResponders, PeerError
from shared.schemas import (
    AttemptOver,
    CertainAnswer,
    Fetch,
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
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import TRACEPARENT, AttributeValue, Tracing
from shared.vocabulary import ServiceClass

OFFER_TIMEOUT_S = 2.0  # longer than a hold may take
WITHDRAW_TIMEOUT_S = 2.0  # longer than an iteration
ANSWERS = ("accepted", "declined", "not_ready", "in_doubt")  # the tags of an OfferAnswer


class OfferMetrics:
    def __init__(self, metrics: Registry) -> None:
        self._offers = metrics.counter(names.OFFERS, "Offers to planners, by answer.", ("answer",))
        for answer in ANSWERS:
            self._offers.labels(answer)
        self._time = metrics.histogram(
            names.OFFER_TIME, "Time until an offer was answered.", names.STEP_BUCKETS_S
        ).labels()

    def answered(self, answer: OfferAnswer, seconds: float) -> None:
        self._offers.labels(str(answer.__struct_config__.tag)).add()
        self._time.observe(seconds)


class Placer:
    """The steps of placing, on behalf of one service."""

    def __init__(
        self, bus: Bus, records: Records, clock: Clock, tracing: Tracing, metrics: OfferMetrics
    ) -> None:
        self._bus, self._records, self._metrics = bus, records, metrics
        self._clock, self._tracing = clock, tracing

    async def offer(self, stored: Stored, *, hops_left: int = 0) -> CertainAnswer | None:
        """Offer an attempt to its record's replica. None: it was held, and its end is reported."""
        return await self.conclude(stored, await self.ask(stored.record, hops_left=hops_left))

    async def ask(self, record: Record, *, hops_left: int = 0) -> OfferAnswer:
        """The planner's answer, maybe asked before the record is stored: workers check that."""
        assert record.replica is not None
        began = self._clock.unix_s()
        headers = {TRACEPARENT: record.traceparent} if record.traceparent else None
        offer = as_offer(record, record.service_class, hops_left=hops_left)
        try:
            answer: OfferAnswer = await self._bus.request(
                subjects.offer(record.replica),
                offer,
                OfferAnswer,
                timeout_s=OFFER_TIMEOUT_S + fetch_most_s(offer.kv_tokens),
                headers=headers,
            )
        except NoResponders:
            answer = OfferNotReady(reason="nobody plans that replica")
        except (BusError, PeerError) as error:
            answer = OfferInDoubt(reason=str(error))
        self._metrics.answered(answer, self._clock.unix_s() - began)
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

    async def conclude(self, stored: Stored, answer: OfferAnswer) -> CertainAnswer | None:
        """The certain answer; call once the record is stored. None as for `offer`."""
        record = stored.record
        match answer:
            case OfferAccepted():
                standard = record.service_class is ServiceClass.STANDARD
                await self.publish_status(record, "accepted" if standard else "relegated", "")
                if record.then is not None:
                    with suppress(BusError):  # then its KV comes when its prompt is computed
                        fetch = Fetch(key=record.key)
                        await self._bus.publish(subjects.fetch(record.then), fetch)
                return answer
            case OfferDeclined() | OfferNotReady():
                return answer
            case OfferInDoubt():
                return await self._in_doubt(record)
            case _:
                assert_never(answer)

    async def _in_doubt(self, record: Record) -> CertainAnswer | None:
        """Nobody knows whether the worker holds the attempt: take it back for certain."""
        over = await self.withdraw(record)
        # An attempt that was held may have sent tokens: its worker reports its end, like any other.
        if over is not None:
            return None
        return OfferDeclined(reason="it did not answer")

    async def withdraw(self, record: Record) -> AttemptOver | None:
        """The end of the attempt with its output; None if the worker never had it and never will.
        Raises BusTimeout if nobody or another incarnation answers: then only the log tells.
        """
        assert record.replica is not None
        ask = Withdraw(key=record.key, attempt=record.attempt, incarnation=record.incarnation)
        try:
            answer = await self._bus.request(
                subjects.withdraw(record.replica), ask, Withdrawn, timeout_s=WITHDRAW_TIMEOUT_S
            )
        except (NoResponders, PeerError) as error:
            raise BusTimeout(f"the worker of {record.replica} does not answer") from error
        return answer.over

    async def publish_status(self, record: Record, state: str, reason: str) -> None:
        """Publish a status to the client; it may be lost."""
        status = Status(
            state=state,
            service_class=record.service_class,
            attempt=record.attempt,
            replica=record.replica,
            reason=reason,
        )
        with suppress(BusError):
            await self._bus.publish(record.stream_subject, status, json=record.json)
