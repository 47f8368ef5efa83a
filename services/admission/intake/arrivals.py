"""Takes in clients' requests: lets them in, waits for their turn, reads, stores, offers them."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import structlog
from msgspec.structs import replace

from services.admission.cancels import Cancels
from services.admission.config import AdmissionConfig
from services.admission.intake.reading import Intake
from services.admission.intake.refusals import Refusals
from services.admission.intake.rounds import Rounds
from services.admission.intake.stall import Stall
from services.admission.intake.token_bucket import TokenBuckets
from services.admission.placement import Placement, slow_down
from services.admission.sweep import Sweep
from shared import subjects
from shared.bus.api import Call
from shared.clock import Clock
from shared.core.admission.admission import AdmissionCore, Opened
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.scaling.tally import ArrivalTally
from shared.core.shared_room import Line, Shares
from shared.errors import BusError, BusTimeout, PeerError, StoreFull
from shared.placing.outcomes import RATE_LIMITED
from shared.placing.place import Placer
from shared.process.chores import Chores
from shared.process.logs import traced
from shared.rules.rules import Rules
from shared.schemas import Body, GenerateRequest, OfferAnswer, Received, Record, Refused
from shared.store.records import Records
from shared.telemetry import conventions as names
from shared.telemetry.telemetry import TRACEPARENT, Tracing
from shared.vocabulary import RequestKey, ServiceClass

T = TypeVar("T")
log = structlog.get_logger()

FULL = "too many requests are under way"
WITHDRAWN = Refused(
    code="request_cancelled", message="the request was cancelled before it was stored"
)
LEADER_S = 6.0  # three brokers elect a leader within 5 s, a store that restarts is back in 2
LEADER_PAUSE_S = 0.1
# Requests read and stored at once, of the `receive_limit` that were let in: with a store that takes
# 60 ms, 1,000/s. A request of another tenant begins beside them at once. For CROWDED_S after a
# refusal and LATELY_S after another tenant asked, one request begins in each turn of the loop: some
# twelve are under way then, so that the other tenant's end soon.
AT_ONCE = 64
CROWDED_S, LATELY_S = 1.0, 10.0
# While a request of a tenant has waited QUEUE_S for its turn, the tenant's new ones are refused. So
# is one whose turn comes after TURN_S: after 2 s its client asks again, and that costs as much.
QUEUE_S, TURN_S = 1.0, 1.6
SAID_S = 0.1  # how long one refusal at the gate is used again


class Arrival(NamedTuple):
    """A request that was let in. `key` is None if the request's id is not a valid one."""

    request: GenerateRequest
    key: RequestKey | None
    call: Call
    tenant: str
    at_unix_s: float


class Known(NamedTuple):
    """A request's id, and the digest that a copy of the request is compared by."""

    key: RequestKey
    digest: bytes
    call: Call


class Arrivals:
    """The requests that come to one admission, until they are stored or refused."""

    def __init__(
        self,
        cfg: AdmissionConfig,
        owner: str,
        clock: Clock,
        tracing: Tracing,
        rules: Rules,
        buckets: TokenBuckets,
        records: Records,
        placer: Placer,
        core: AdmissionCore,
        intake: Intake,
        rounds: Rounds,
        placement: Placement,
        cancels: Cancels,
        refusals: Refusals,
        sweep: Sweep,
        stall: Stall,
        chores: Chores,
        tally: ArrivalTally,
        tool_format: Callable[[str], str],
    ) -> None:
        self._owner, self._clock, self._tracing, self._rules = owner, clock, tracing, rules
        self._buckets, self._records, self._placer, self._core = buckets, records, placer, core
        self._intake, self._rounds, self._placement = intake, rounds, placement
        self._cancels, self._refusals, self._sweep, self._stall = cancels, refusals, sweep, stall
        self._chores, self._tally = chores, tally
        self._tool_format = tool_format  # by model
        self._reading = Shares(cfg.receive_limit)
        self._reading_bytes = Shares(cfg.receive_limit_bytes)
        self._line: Line[Arrival] = Line(AT_ONCE)
        self._calling = False  # the next of the line is looked for in the next turn of the loop
        self._last_tenant, self._other_unix_s = "", 0.0  # when it was another one before
        self._said, self._said_unix_s = slow_down(FULL, 1.0), 0.0

    @property
    def idle(self) -> bool:
        return not self._reading.total

    def gate(self, call: Call) -> Refused | None:
        """The refusal of a request whose tenant has no room. It takes 1 us: any number may come."""
        tenant, tier = call.subject.split(".")[-2:]
        weight = self._rules.tenants.named(tenant).weight
        reading, now = int(self._reading.held(tenant)) + 1, self._clock.unix_s()
        if tenant != self._last_tenant:
            self._last_tenant, self._other_unix_s = tenant, now
        first = self._line.first(tenant)
        if (
            (first is None or now - first.at_unix_s < QUEUE_S)
            and self._reading.fits(tenant, weight)
            and self._reading_bytes.fits(tenant, weight, call.payload_bytes)
            and not self._core.full(tenant, weight, reading)
        ):
            return None
        self._refusals.note(tenant, tier, "slow_down")
        if abs(now - self._said_unix_s) > SAID_S:
            wait_s = self._core.shortest_backlog_s(now_unix_s=now)
            self._said, self._said_unix_s = slow_down(FULL, wait_s), now
        return self._said

    def on_request(self, request: GenerateRequest, call: Call) -> None:
        if self._stall.look() and self._sweep.admissions > 1:
            return  # its client has asked another admission, which may have told it no
        tenant = call.subject.split(".")[-2]
        key: RequestKey | None = None
        with suppress(PeerError):  # what is no id may be anything, and is refused below
            key = subjects.request_key(tenant, request.request_id)
            self._cancels.storing(key)
        weight = self._rules.tenants.named(tenant).weight
        self._reading.take(tenant, weight)
        self._reading_bytes.take(tenant, weight, call.payload_bytes)
        arrival = Arrival(request, key, call, tenant, self._clock.unix_s())
        self._line.join(tenant, weight, arrival)
        self._call_next()

    def _call_next(self) -> None:
        if not self._calling:
            self._calling = True
            asyncio.get_running_loop().call_soon(self._begin_next)

    def _begin_next(self) -> None:
        """Begin to read the requests whose turn it is."""
        self._calling, now = False, self._clock.unix_s()
        crowded = now - self._said_unix_s < CROWDED_S and now - self._other_unix_s < LATELY_S
        while (arrival := self._line.next()) is not None:
            self._chores.spawn(self._receive(arrival), "admission.receive")
            if crowded:
                self._call_next()
                return

    async def _receive(self, arrival: Arrival) -> None:
        caller = arrival.call.headers.get(TRACEPARENT, "")
        traceparent = self._tracing.reserve(caller)
        try:
            with traced(traceparent):
                await self._traced(arrival, caller, traceparent)
        finally:
            self._reading.give(arrival.tenant)
            self._reading_bytes.give(arrival.tenant, arrival.call.payload_bytes)
            self._line.done(arrival.tenant)
            self._call_next()

    async def _traced(self, arrival: Arrival, caller: str, traceparent: str) -> None:
        """Take the request in, and tell its client whatever is wrong. `traceparent` is that of the
        request's span `request`, which ends here if no part of the request is stored.
        """
        request, key, call, _, now = arrival
        attributes = {names.REQUEST_KEY: key} if key else dict[str, str]()
        span = self._tracing.start("admit", traceparent, attributes, at_unix_s=now, kind="server")
        ends_here = True
        try:
            ends_here = not await self._take_in(arrival, caller, traceparent)
        except PeerError as error:
            span.set(**{names.ERROR_TYPE: error.code})
            refused = Refused(code=error.code, message=error.message, param=error.param)
            await self._refusals.answer(call, refused)
        except StoreFull as error:
            log.warning("request.refused", request_id=request.request_id[:64], error=str(error))
            span.set(**{names.ERROR_TYPE: "store_full"})
            wait_s = self._core.shortest_backlog_s(now_unix_s=now)
            refused = slow_down("there is no room to store the request", wait_s)
            await self._refusals.answer(call, refused)
        except BusError as error:
            log.warning("request.doubtful", request_id=request.request_id, error=str(error))
            self._sweep.soon()  # it may have been stored
            ends_here = False
            span.set(**{names.ERROR_TYPE: "store_timeout"})
            refused = Refused(
                code="server_is_overloaded",
                message="the store does not answer now",
                retry_after_s=1.0,
            )
            await self._refusals.answer(call, refused)
        finally:
            span.end()
            if ends_here:
                until = self._clock.unix_s()
                self._tracing.record("request", caller, now, until, attributes, own=traceparent)
            if key is not None:
                self._cancels.forget(key)

    async def _take_in(self, arrival: Arrival, caller: str, traceparent: str) -> bool:
        """Read, store and offer a request. False: refused, or known. Raises PeerError, BusError."""
        call, now = arrival.call, arrival.at_unix_s
        tier = self._rules.tiers.asked(call.subject.rpartition(".")[2])
        if self._clock.unix_s() - now > TURN_S:
            wait_s = self._core.shortest_backlog_s(now_unix_s=now)
            await self._refusals.answer(call, slow_down(FULL, wait_s))
            return False
        tenant = subjects.tenant_of(call.subject, arrival.request.tenant)
        request = replace(arrival.request, tenant=tenant)
        key, digest = await self._intake.look(request, tier, call.payload_bytes)
        known, until = Known(key, digest, call), now + LEADER_S
        if await self._once_led(lambda: self._answer_known(known), until):
            return False
        limits, admissions = self._rules.tenants.named(tenant), self._sweep.admissions
        wait_s = self._buckets.wait_s(tenant, limits, admissions, now)
        if wait_s > 0.0:
            limit, retry_s = f"its limit of {limits.tokens_s:g} tokens/s", math.ceil(wait_s)
            message = f"tenant {tenant} is over {limit}; retry in {retry_s} s"
            refused = Refused(code=RATE_LIMITED, message=message, retry_after_s=retry_s)
            await self._refusals.answer(call, refused)
            return False
        record, body = await self._intake.read(
            request,
            key,
            tier,
            payload_bytes=call.payload_bytes,
            digest=digest,
            arrived_unix_s=now,
            json=call.json,
            traceparent=traceparent,
            caller=caller,
        )
        read = self._records.with_small(record, body)
        record = await self._once_led(lambda: self._rounds.of(read), until)
        self._buckets.take(tenant, limits, record.prompt_tokens, admissions, now)
        refusable_s = self._core.refusable_s(record, now_unix_s=now)
        if refusable_s is not None and not self._core.tries(record, now_unix_s=now):
            refused = slow_down("no replica can hold its SLO now", refusable_s)
            await self._refusals.answer(call, refused, record)
            return False
        return await self._store(known, record, body, refusable_s is None, now)

    async def _store(
        self, known: Known, record: Record, body: Body, told: bool, now: float
    ) -> bool:
        """Store the record with its first place, and offer the request there. False: it was
        cancelled, or a copy came first. `told`: the client hears at once that it was received.
        """
        key, call = known.key, known.call
        record, answer = self._asked(record, now)
        if self._cancels.cancelled(key):
            await self._refusals.answer(call, WITHDRAWN)
            return False
        stored = await self._once_led(lambda: self._records.create(record, body), now + LEADER_S)
        self._cancels.stored(key)
        if stored is None:  # a copy of the request came first
            if not await self._answer_known(known):
                raise BusTimeout("the record that has the id is gone")
            return False
        self._sweep.opened(stored.record)
        self._tally.add(stored.record)
        if told:
            await call.reply(self._received(record, attached=False))
        else:
            self._chores.spawn(self._tell(record, call), "admission.tell")
        if stored.record != record:
            # the answer to our create was lost, and a sweep has already moved the record on
            self._sweep.soon()
        elif answer is None:
            self._placement.feed(Opened(record, told))
        else:
            self._core.placed(record, told=told, now_unix_s=now)
            self._chores.spawn(self._placement.conclude(stored, answer), "admission.step")
        return True

    def _asked(self, record: Record, now: float) -> tuple[Record, asyncio.Task[OfferAnswer] | None]:
        """The record with its first place, and the answer to its offer there, if any. The offer
        leaves beside the record: a worker without the record declines. Nothing is concluded before
        it is stored.
        """
        picked = self._core.pick(as_offer(record, ServiceClass.STANDARD), now_unix_s=now)
        if picked is None:
            return record, None
        placed = life.placed(
            record,
            self._owner,
            picked.replica,
            picked.incarnation,
            attempt=record.attempt,
            apart=picked.apart,
            now_unix_s=self._clock.unix_s(),
        )
        assert placed is not None, "a new record can be placed"
        asking = self._placer.ask(placed, hops_left=picked.hops_left)
        return placed, self._chores.start(asking, "admission.ask")

    async def _once_led(self, step: Callable[[], Awaitable[T]], until_unix_s: float) -> T:
        """The outcome of a step, which is taken again while the brokers elect a leader. Raises
        StoreFull at once, any other BusError after `until_unix_s`.
        """
        while True:
            try:
                return await step()
            except StoreFull:
                raise
            except BusError:
                if self._clock.unix_s() >= until_unix_s:
                    raise
            await asyncio.sleep(LEADER_PAUSE_S)

    async def _tell(self, record: Record, call: Call) -> None:
        """Answer the client of a request that may be refused."""
        refused = await self._placement.decision(record.key)
        await call.reply(refused or self._received(record, attached=False))

    async def _answer_known(self, known: Known) -> bool:
        """If the id is taken, answer with the subject of its events. False: it is free. Raises
        PeerError if another request has it.
        """
        stored = await self._records.get(known.key)
        if stored is None:
            return False
        if stored.record.asked != known.digest:
            raise PeerError(
                "another request has this id: its prompt, its sampling or its SLO is different",
                code="conflict",
                param="request_id",
            )
        await known.call.reply(self._received(stored.record, attached=True))
        return True

    def _received(self, record: Record, *, attached: bool) -> Received:
        return Received(
            request_id=record.key.partition(".")[2],
            stream_subject=record.stream_subject,
            arrived_unix_s=record.arrived_unix_s,
            prompt_tokens=record.prompt_tokens,
            tool_format=self._tool_format(record.model),
            thinking=record.thinking,
            attached=attached,
            tier=record.tier,
        )
