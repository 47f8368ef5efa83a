"""Admission: brings requests in, places them and writes their end. Any instance may handle any
message, since the records decide.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random
from typing import NamedTuple, TypeVar, assert_never

import structlog
from msgspec.structs import replace

from services.admission.config import AdmissionConfig
from services.admission.endpoints.explain import Explanations
from services.admission.endpoints.replay import Replays
from services.admission.endpoints.tokenize import TokenDesk
from services.admission.intake.gate import Door
from services.admission.intake.reading import Intake
from services.admission.intake.stall import Stall
from services.admission.intake.token_bucket import TokenBuckets
from services.admission.sweep import Sweep
from services.admission.workers import Workers
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.core.admission.admission import (
    AdmissionAction,
    AdmissionCore,
    AdmissionEvent,
    AdmissionSettings,
    Answered,
    GaveWay,
    Gone,
    Heard,
    Lost,
    Opened,
    Place,
    Pooled,
    Refuse,
    Relegate,
)
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.shared_room import Line, Shares
from shared.errors import BusError, BusTimeout, PeerError, StoreFull
from shared.models import shipped as models
from shared.placing.ending import Ending
from shared.placing.offer_metrics import OfferMetrics
from shared.placing.outcomes import Outcomes
from shared.placing.place import Placer
from shared.policy import registry
from shared.process.chores import Chores
from shared.process.drive import Inbox, drive
from shared.process.logs import traced
from shared.process.reload import follow_files, rules_of
from shared.schemas import (
    Announce,
    Attach,
    AttemptOver,
    Cancel,
    CertainAnswer,
    Detokenize,
    Digest,
    Ended,
    Explain,
    GenerateRequest,
    Hint,
    OfferAccepted,
    OfferAnswer,
    PoolDigest,
    Received,
    Record,
    Refused,
    Settled,
    Tokenize,
)
from shared.store.leases import RENEW_S, Lease
from shared.store.outputs import ENDED_TTL_S
from shared.store.presence import Absences, be_present
from shared.store.records import Records, Stored
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import TRACEPARENT, Tracing
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass

T = TypeVar("T")
log = structlog.get_logger()

QUEUE = "admission"
# A second of digests of 256 replicas (10/s each) and the 1000 requests of a lost replica, rounded
# up. A digest that finds it full is dropped: another follows. The sweep finds a dropped record.
INBOX_LIMIT = 4096
FULL = "too many requests are under way"
WITHDRAWN = Refused(
    code="request_cancelled", message="the request was cancelled before it was stored"
)
LEADER_S = 6.0  # three brokers elect a leader within 5 s, a store that restarts is back in 2
LEADER_PAUSE_S = 0.1
TELL_S = 1.0  # the longest that a client waits to hear whether its request is refused
# Requests read and stored at once, of the `receive_limit` that were let in: with a store that takes
# 60 ms, 1,000/s. What another tenant sends begins beside them at once. For CROWDED_S after a
# refusal and LATELY_S after another tenant asked, one begins in each turn of the loop: some twelve
# are under way then, so that those of the other tenant end soon.
AT_ONCE = 64
CROWDED_S, LATELY_S = 1.0, 10.0
# While one of its tenant has waited so long for its turn, a request is refused. One whose own turn
# comes so late is refused then: after 2 s its client asks again, and the copy would cost as much.
QUEUE_S, TURN_S = 1.0, 1.6
SAID_S = 0.1  # one refusal at the gate, and one notice of them, serves for so long


class Arrival(NamedTuple):
    """A request that was let in. `key` is None where its id is none."""

    request: GenerateRequest
    key: RequestKey | None
    call: Call
    tenant: str
    at_unix_s: float


class Admission:
    """One instance of admission."""

    def __init__(
        self,
        cfg: AdmissionConfig,
        bus: Bus,
        clock: Clock,
        tokenizer: Tokenizer,
        tracing: Tracing,
        rng: Random,
    ) -> None:
        self._cfg, self._bus, self._clock, self._tracing = cfg, bus, clock, tracing
        self.name = f"admission-{rng.getrandbits(48):012x}"
        self._tool_format = tokenizer.tool_format
        self._rules, self._buckets = rules_of(cfg), TokenBuckets()
        self._records = Records(bus.requests, bus.bodies, lambda: f"{rng.getrandbits(32):08x}")
        self.metrics = Registry()
        self._workers = Workers(clock, cfg.lost_s, self.metrics)
        self._outcomes = Outcomes(
            self.metrics, lambda: self._workers.model, lambda: self._rules.tiers.tiers
        )
        self._ending = Ending(bus, self._records, tracing, self._outcomes, self._pay)
        self._replays = Replays(bus, self._records, clock)
        self._explanations = Explanations(self._records, self._replays, clock)
        self._token_desk = TokenDesk(tokenizer)
        self._placer = Placer(bus, self._records, clock, tracing, OfferMetrics(self.metrics))
        router = registry.router(cfg.policy, cfg.settings)
        settings = AdmissionSettings(
            hop_limit=cfg.hop_limit,
            homeless_s=cfg.homeless_s,
            open_limit=cfg.open_limit,
            pool_limit=cfg.pool_limit,
        )
        self.core = AdmissionCore(router, rng, settings)
        self._inbox: Inbox[AdmissionEvent] = Inbox(INBOX_LIMIT)
        model = models.folder(cfg.model).resolve().name if cfg.model else ""
        self._intake = Intake(
            self._rules,
            tokenizer,
            model,
            self._workers,
            self._records.body_key,
            self.name,
        )
        absences = Absences(bus, clock)
        self._sweep = Sweep(
            cfg,
            bus,
            clock,
            self.name,
            self._records,
            self._placer,
            self._workers,
            absences,
            self.core,
            self._ending,
            self._feed,
        )
        self._lease = Lease(bus.leases, f"admission.{self.name}", self.name, absences)
        intake = Endpoint(
            "requests", subjects.REQUESTS, GenerateRequest, self._on_request, QUEUE, self._gate
        )
        self._door = Door(bus, clock, intake, self.name)
        self._chores = Chores()
        self._reading = Shares(cfg.receive_limit)
        self._reading_bytes = Shares(cfg.receive_limit_bytes)
        self._line: Line[Arrival] = Line(AT_ONCE)
        self._calling = False  # the next of the line is looked for in the next turn of the loop
        self._last_tenant, self._other_unix_s = "", 0.0  # when it was another one before
        self._said, self._said_unix_s = _slow_down(FULL, 1.0), 0.0
        self._refusals: Counter[str] = Counter()  # by tier: those not told to who watches
        # of requests that are not stored yet: a cancel that comes now finds no record
        self._storing: dict[RequestKey, bool] = {}  # whether it was cancelled
        self._stall = Stall(bus, clock)
        # requests whose clients wait for the decision
        self._untold: dict[RequestKey, asyncio.Future[Refused | None]] = {}

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        bus = self._bus
        endpoints = [
            Endpoint("attach", subjects.ATTACHES, Attach, self._on_attach, QUEUE),
            Endpoint("explain", subjects.EXPLAINS, Explain, self._on_explain, QUEUE),
            Endpoint("explain-all", subjects.EXPLAIN_ALL, Explain, self._on_explain, QUEUE),
            Endpoint("tokens", subjects.TOKENS, Tokenize | Detokenize, self._on_tokens, QUEUE),
            Endpoint("over", subjects.OVERS, AttemptOver, self._on_over, QUEUE),
        ]
        async with self._chores as chores:
            chores.listen(await bus.subscribe(subjects.DIGESTS, Digest, self._on_digest))
            chores.listen(await bus.subscribe(subjects.POOL, PoolDigest, self._on_pool))
            chores.listen(await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, self._on_announce))
            chores.listen(
                await bus.subscribe(subjects.CANCELS, Cancel, self._on_cancel, queue=QUEUE)
            )
            chores.listen(await bus.subscribe(subjects.CANCELS, Cancel, self._note_cancel))
            chores.listen(await be_present(bus, self.name))
            background = [
                chores.start(self._keep_lease(), name="admission.lease"),
                chores.start(self._sweep.run(), name="admission.sweep"),
                chores.start(self._stall.watch(), name="admission.stall"),
                chores.start(
                    follow_files("admission", self._cfg, self._rules), name="admission.rules"
                ),
            ]
            driver = chores.start(
                drive(self.core, self._inbox, self._begin, self._clock, name="admission"),
                "admission.drive",
            )
            answers = chores.listen(
                await bus.serve("admission", endpoints, {"instance": self.name})
            )
            opening = chores.start(self._door.keep(), name="admission.door")
            log.info(
                "admission.ready",
                instance=self.name,
                policy=self._cfg.policy,
                tiers=self._rules.tiers.name,
            )
            await stop.wait()
            opening.cancel()
            await asyncio.wait((opening,))
            await self._door.close()
            await answers.stop()  # an ended attempt goes to another instance; its worker repeats it
            await self._drain(driver)
            for task in (*background, driver):
                task.cancel()

    async def _drain(self, driver: asyncio.Task[None]) -> None:
        """Place what is open; what is left after drain_s, another instance takes over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cfg.drain_s):
                await asyncio.sleep(
                    0.02
                )  # requests already delivered start, so that they are counted
                while self._reading.total or self._untold:
                    await asyncio.sleep(0.02)
                self._inbox.drain()
                await asyncio.wait((driver,))
        with suppress(BusError):  # the lease runs out by itself
            await self._lease.release()

    async def _keep_lease(self) -> None:
        """Renew the lease: while it is held, no sweep takes over what this instance has open."""
        while True:
            try:
                if not self._lease.held or not await self._lease.renew():
                    await self._lease.acquire()
            except BusError:
                log.warning("lease.doubtful", instance=self.name)
            await asyncio.sleep(RENEW_S)

    # ------------------------------------------------------------ the core's steps

    def _feed(self, event: AdmissionEvent) -> None:
        if isinstance(event, Answered | Gone | Lost):
            self._inbox.put(event)  # bounded: one per step under way, one per replica
        elif not self._inbox.offer(event) and isinstance(event, Opened):
            self._sweep.soon()

    async def _begin(self, action: AdmissionAction) -> None:
        self._chores.spawn(self._perform(action), "admission.step")

    async def _perform(self, action: AdmissionAction) -> None:
        try:
            match action:
                case Place(key, attempt, replica, incarnation, hops_left, declined):
                    stored = await self._records.change(
                        key,
                        lambda record: life.placed(
                            record,
                            self.name,
                            replica,
                            incarnation,
                            attempt=attempt,
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
                    self._feed(Gone(key))
                case Refuse(key, reason, retry_after_s, declined):
                    ended = await self._ending.end(
                        key,
                        lambda record: life.refused(
                            record,
                            self.name,
                            self._clock.unix_s(),
                            message=reason,
                            retry_after_s=retry_after_s,
                            declined=declined,
                        ),
                    )
                    # where it is another's by now, it goes on: its client hears of its end
                    refused = None if ended is None else _slow_down(reason, retry_after_s)
                    self._decided(key, refused)
                    self._feed(Gone(key))
                case _:
                    assert_never(action)
        except (BusError, PeerError) as error:
            # The record says how far it came; the sweep goes on from there. A damaged one, nobody
            # can go on with.
            log.warning("step.doubtful", request=action.key, error=str(error))
            self._feed(Gone(action.key))
            self._sweep.soon()

    def _placed(
        self, key: RequestKey, attempt: int, replica: ReplicaId, answer: CertainAnswer | None
    ) -> None:
        if answer is None:
            self._decided(key)
            self._feed(Gone(key))
            self._sweep.soon()  # if it is ours after all, that finds it
            self._chores.spawn(self._end_cancelled(key), "admission.cancelled")
            return
        if isinstance(answer, OfferAccepted):
            self._decided(key)
        self._feed(Answered(key, attempt, replica, answer))

    async def _relegate(self, relegate: Relegate) -> None:
        stored = await self._records.change(
            relegate.key,
            lambda record: life.relegated(
                record,
                self.name,
                now_unix_s=self._clock.unix_s(),
                why=relegate.reason,
                declined=relegate.declined,
                neighbours=relegate.neighbours,
            ),
        )
        if stored is None:
            await self._end_cancelled(relegate.key)
            return
        await self._announce_relegated(stored.record, relegate.reason)

    async def _announce_relegated(self, record: Record, reason: str) -> None:
        await self._placer.publish_status(record, "relegated", reason)
        with suppress(BusError):  # the next listing finds it
            await self._bus.publish(subjects.RELEGATED, Hint(key=record.key))

    # ------------------------------------------------------------ requests

    def _gate(self, call: Call) -> Refused | None:
        """The refusal of a request for which its tenant has no room here. It takes 1 us: a tenant
        may send any number.
        """
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
            and not self.core.full(tenant, weight, reading)
        ):
            return None
        self._note_refused(tenant, tier, "slow_down")
        if abs(now - self._said_unix_s) > SAID_S:
            wait_s = self.core.shortest_backlog_s(now_unix_s=now)
            self._said, self._said_unix_s = _slow_down(FULL, wait_s), now
        return self._said

    def _on_request(self, request: GenerateRequest, call: Call) -> None:
        if self._stall.look() and self._sweep.admissions > 1:
            return  # its client has asked another admission, which may have told it no
        tenant = call.subject.split(".")[-2]
        key: RequestKey | None = None
        with suppress(PeerError):  # what is no id may be anything, and is refused below
            key = subjects.request_key(tenant, request.request_id)
            self._storing.setdefault(key, False)
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
        """Begin to read what has its turn."""
        self._calling, now = False, self._clock.unix_s()
        crowded = now - self._said_unix_s < CROWDED_S and now - self._other_unix_s < LATELY_S
        while (arrival := self._line.next()) is not None:
            self._chores.spawn(self._receive(arrival), "admission.receive")
            if crowded:
                self._call_next()
                return

    async def _receive(self, arrival: Arrival) -> None:
        request, key, call, tenant, at_unix_s = arrival
        caller = call.headers.get(TRACEPARENT, "")
        traceparent = self._tracing.reserve(caller)
        try:
            with traced(traceparent):
                await self._received_in(request, key, call, caller, traceparent, at_unix_s)
        finally:
            self._reading.give(tenant)
            self._reading_bytes.give(tenant, call.payload_bytes)
            self._line.done(tenant)
            self._call_next()

    async def _received_in(
        self,
        request: GenerateRequest,
        key: RequestKey | None,
        call: Call,
        caller: str,
        traceparent: str,
        now: float,
    ) -> None:
        """Read, store and offer a request that came `now`, in unix time. `traceparent` is that of
        its span `request`.
        """
        tier = self._rules.tiers.asked(call.subject.rpartition(".")[2])
        attributes = {names.REQUEST_KEY: key} if key else dict[str, str]()
        span = self._tracing.start("admit", traceparent, attributes, at_unix_s=now, kind="server")
        ends_here = True  # nothing of it is stored: its trace ends with this step
        try:
            if self._clock.unix_s() - now > TURN_S:
                wait_s = self.core.shortest_backlog_s(now_unix_s=now)
                await self._refuse(call, _slow_down(FULL, wait_s))
                return
            request = replace(request, tenant=subjects.tenant_of(call.subject, request.tenant))
            key, digest = await self._intake.look(request, tier, call.payload_bytes)
            until = now + LEADER_S
            if await self._once_led(lambda: self._answer_known(key, digest, call), until):
                return
            limits, admissions = self._rules.tenants.named(request.tenant), self._sweep.admissions
            wait_s = self._buckets.wait_s(request.tenant, limits, admissions, now)
            if wait_s > 0.0:
                message = "this tenant has had its tokens"
                await self._refuse(call, _slow_down(message, math.ceil(wait_s)))
                return
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
            record = self._records.with_small(record, body)
            self._buckets.take(request.tenant, limits, record.prompt_tokens, admissions, now)
            refusable_s = self.core.refusable_s(record, now_unix_s=now)
            if refusable_s is not None and not self.core.tries(record, now_unix_s=now):
                refused = _slow_down("no replica can hold its SLO now", refusable_s)
                await self._refuse(call, refused)
                return
            told = refusable_s is None
            picked = self.core.pick(as_offer(record, ServiceClass.STANDARD), now_unix_s=now)
            if picked is not None:
                placed = life.placed(
                    record,
                    self.name,
                    picked.replica,
                    picked.incarnation,
                    attempt=record.attempt,
                    now_unix_s=self._clock.unix_s(),
                )
                assert placed is not None, "a new record can be placed"
                record = placed
            # The offer leaves beside the record. The worker that gets it finds the record, or
            # declines. Nothing is concluded before the record is stored.
            answer = (
                None
                if picked is None
                else self._chores.start(
                    self._placer.ask(record, hops_left=picked.hops_left), "admission.ask"
                )
            )
            if self._storing.get(key):
                await self._refuse(call, WITHDRAWN)
                return
            stored = await self._once_led(lambda: self._records.create(record, body), until)
            if self._storing.pop(key, False):
                self._chores.spawn(self._cancel(key), "admission.cancel")
            if stored is None:  # a copy of the request came first
                if not await self._answer_known(key, digest, call):
                    raise BusTimeout("the record that has the id is gone")
                return
            ends_here = False
            self._sweep.opened(stored.record)
            if told:
                await call.reply(self._received(record, attached=False))
            else:
                self._chores.spawn(self._tell(record, call), "admission.tell")
            if stored.record != record:
                # the answer to our create was lost, and a sweep has already moved the record on
                self._sweep.soon()
            elif answer is None:
                self._feed(Opened(record, told))
            else:
                self.core.placed(record, told=told, now_unix_s=now)
                self._chores.spawn(self._conclude(stored, answer), "admission.step")
        except PeerError as error:
            span.set(**{names.ERROR_TYPE: error.code})
            await self._refuse(
                call, Refused(code=error.code, message=error.message, param=error.param)
            )
        except StoreFull as error:
            log.warning("request.refused", request_id=request.request_id[:64], error=str(error))
            span.set(**{names.ERROR_TYPE: "store_full"})
            wait_s = self.core.shortest_backlog_s(now_unix_s=now)
            await self._refuse(call, _slow_down("there is no room to store the request", wait_s))
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
            await self._refuse(call, refused)
        finally:
            span.end()
            if ends_here:
                until = self._clock.unix_s()
                self._tracing.record("request", caller, now, until, attributes, own=traceparent)
            if key is not None:
                self._storing.pop(key, None)

    async def _once_led(self, step: Callable[[], Awaitable[T]], until_unix_s: float) -> T:
        """The outcome of a step of the store, which may be taken again: also where the brokers
        elect a leader. Raises BusError where it has none by then, StoreFull.
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

    async def _refuse(self, call: Call, refused: Refused) -> None:
        tenant, tier = call.subject.split(".")[-2:]
        self._note_refused(tenant, tier, refused.code)
        await call.reply(refused)

    def _note_refused(self, tenant: str, tier: str, code: str) -> None:
        self._outcomes.refused(tenant, tier, code)
        if code == "slow_down":
            if not self._refusals:
                self._chores.spawn(self._tell_watchers(), "admission.refusals")
            self._refusals[tier] += 1

    async def _tell_watchers(self) -> None:
        """One notice for the refusals of SAID_S."""
        await asyncio.sleep(SAID_S)
        refusals, self._refusals = self._refusals, Counter()
        for tier, requests in refusals.items():
            with suppress(BusError):
                await self._bus.publish(subjects.ENDED, Ended(tier=tier, requests=requests))

    async def _tell(self, record: Record, call: Call) -> None:
        """Answer the client of a request that may be refused: once that is decided, and at the
        latest after TELL_S.
        """
        decided = self._untold[record.key] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(TELL_S):
                refused = await decided
        except TimeoutError:
            refused = None
        finally:
            del self._untold[record.key]
        await call.reply(refused or self._received(record, attached=False))

    def _decided(self, key: RequestKey, refused: Refused | None = None) -> None:
        decided = self._untold.get(key)
        if decided is not None and not decided.done():
            decided.set_result(refused)

    async def _conclude(self, stored: Stored, answer: asyncio.Task[OfferAnswer]) -> None:
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
            self._feed(Gone(record.key))
            self._sweep.soon()

    async def _answer_known(self, key: RequestKey, digest: bytes, call: Call) -> bool:
        """If the id is taken, answer with the subject of that request's events. False if it is
        free. Raises PeerError if another request has it.
        """
        stored = await self._records.get(key)
        if stored is None:
            return False
        if stored.record.asked != digest:
            raise PeerError(
                "another request has this id: its prompt, its sampling or its SLO is different",
                code="conflict",
                param="request_id",
            )
        await call.reply(self._received(stored.record, attached=True))
        return True

    def _on_attach(self, attach: Attach, call: Call) -> None:
        self._chores.spawn(self._replays.answer(attach, call), "admission.attach")

    def _on_explain(self, explain: Explain, call: Call) -> None:
        self._chores.spawn(self._explanations.answer(explain, call), "admission.explain")

    def _on_tokens(self, question: Tokenize | Detokenize, call: Call) -> None:
        self._chores.spawn(self._token_desk.answer(question, call), "admission.tokens")

    # ------------------------------------------------------------ ends

    def _on_over(self, over: AttemptOver, call: Call) -> None:
        if call.subject != subjects.over(over.replica):
            return  # a worker speaks of its own attempts only
        self._chores.spawn(self._settle(over, call), "admission.settle")

    async def _settle(self, over: AttemptOver, call: Call) -> None:
        """Write into the record how an attempt ended, unless the record has moved on since."""
        try:
            stored = await self._ending.end(
                over.key,
                lambda record: life.settled(record, over, self.name, self._clock.unix_s()),
            )
            if stored is None and await self._is_deleted(over):
                self._sweep.soon()
                return  # the worker sends it again, and its log keeps the output meanwhile
        except BusError:
            return  # the worker sends it again
        if stored is not None and stored.record.verdict is None:
            if stored.record.state == RecordState.RELEGATED:
                if not stored.record.resume.measure.tokens:
                    self._feed(GaveWay(stored.record))
                await self._announce_relegated(stored.record, over.message or over.why)
            else:
                await self._placer.publish_status(stored.record, "replaced", over.why)
                self._feed(Opened(stored.record))
        await call.reply(Settled())

    async def _is_deleted(self, over: AttemptOver) -> bool:
        """True if the record was deleted: that of a request that ended since its last token has not
        expired yet.
        """
        last_unix_s = over.resume.measure.last_unix_s
        if self._clock.unix_s() - last_unix_s > ENDED_TTL_S / 2:
            return False
        return await self._records.get(over.key) is None

    def _pay(self, ended: Record) -> None:
        """The tenant's bucket pays for the output of a request, whoever let it in."""
        assert ended.verdict is not None
        tenant, now = ended.key.partition(".")[0], self._clock.unix_s()
        limits, tokens = self._rules.tenants.named(tenant), ended.verdict.output_tokens
        self._buckets.take(tenant, limits, tokens, self._sweep.admissions, now)

    def _on_cancel(self, cancel: Cancel, call: Call) -> None:
        tenant, request_id = call.subject.split(".")[-2:]
        try:
            key = subjects.request_key(tenant, request_id)
        except PeerError:
            return
        self._chores.spawn(self._cancel(key), "admission.cancel")

    def _note_cancel(self, cancel: Cancel, call: Call) -> None:
        tenant, request_id = call.subject.split(".")[-2:]
        key = RequestKey(f"{tenant}.{request_id}")
        if key in self._storing:
            self._storing[key] = True

    async def _cancel(self, key: RequestKey) -> None:
        """Write the tombstone. A worker that holds the request receives the cancel itself; if none
        holds it, the request ends here.
        """
        try:
            await self._records.change(key, life.cancelled)
            await self._end_cancelled(key)
        except BusError:
            self._sweep.soon()

    async def _end_cancelled(self, key: RequestKey) -> None:
        """End a cancelled request that no replica holds."""
        await self._ending.end(key, lambda record: life.closed(record, self._clock.unix_s()))

    # ------------------------------------------------------------ digests and heartbeats

    def _on_digest(self, digest: Digest, call: Call) -> None:
        self._feed(Heard(digest))

    def _on_pool(self, digest: PoolDigest, call: Call) -> None:
        self._feed(Pooled(digest))

    def _on_announce(self, announce: Announce, call: Call) -> None:
        if call.subject != subjects.announce(announce.replica):
            return  # a worker speaks for itself only
        if self._workers.received(announce):
            self._sweep.soon()

    def _received(self, record: Record, *, attached: bool) -> Received:
        return Received(
            request_id=record.key.partition(".")[2],
            stream_subject=record.stream_subject,
            arrived_unix_s=record.arrived_unix_s,
            prompt_tokens=record.prompt_tokens,
            tool_format=self._tool_format,
            attached=attached,
            tier=record.tier,
        )


def _slow_down(message: str, retry_after_s: float) -> Refused:
    return Refused(code="slow_down", message=message, retry_after_s=retry_after_s)
