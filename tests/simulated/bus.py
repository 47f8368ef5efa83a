"""The Bus of shared/bus/api.py without a network: real service code runs on it in virtual time, and
the same seed gives the same run.

An example of one process of a simulated fleet, inside run_virtual:

    net = SimNet(random.Random(seed), Faults(loss=0.01))
    process = SimProcess("planner-0")
    process.start(serve(config, net.connect("planner-0", process), process.clock))
"""

import asyncio
import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar

from msgspec import Struct

from shared.bus import codec
from shared.bus.api import Endpoint, Entry, Handler, KeyValue, Log, Subscription
from shared.errors import BusError, BusTimeout, NoResponders, PeerError, SlacklineError, StoreFull
from shared.schemas import Refused
from shared.subjects import EVERY
from tests.simulated.broker import Broker, Envelope, Link, Listening
from tests.simulated.process import SimProcess
from tests.simulated.store import BucketState, LogState

T = TypeVar("T")

STORE_S = 2.0  # as in shared/bus/nats.py
STOP_S = 5.0  # as in shared/bus/subscriptions.py
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SUBJECT = re.compile(r"[^\s.]+(\.[^\s.]+)*")


class SimNet(Broker):
    """A broker that makes connections."""

    def connect(self, name: str, process: SimProcess | None = None) -> "SimBus":
        """A new connection, up at once unless the broker is down. It ends with its process; without
        a process it belongs to the test.
        """
        return SimBus(Link(self, name, process, back_at_s=self.ready_at_s()))


class SimCall:
    """One incoming message."""

    __slots__ = ("_bus", "_envelope", "json")

    def __init__(self, bus: "SimBus", envelope: Envelope) -> None:
        self._bus = bus
        self._envelope = envelope
        self.json = codec.speaks_json(envelope.headers)

    @property
    def subject(self) -> str:
        return self._envelope.subject

    @property
    def headers(self) -> Mapping[str, str]:
        return self._envelope.headers or {}

    @property
    def payload_bytes(self) -> int:
        return len(self._envelope.payload)

    async def reply(self, msg: Struct) -> None:
        await self._bus.link.sendable()
        self._bus.answer(self._envelope, msg, json=self.json)


class SimSubscription:
    """Subscriptions that begin and end together."""

    def __init__(self, bus: "SimBus", wanted: Sequence[Endpoint]) -> None:
        self._bus = bus
        self._active = True
        link = bus.link
        self._listenings = [
            Listening(
                each.subject, each.queue, link, functools.partial(self._hear, each), link.context()
            )
            for each in wanted
        ]
        for listening in self._listenings:
            link.listen(listening)

    async def stop(self) -> None:
        await self._bus.link.sendable()
        for listening in self._listenings:
            self._bus.link.unlisten(listening)
        self._listenings.clear()
        with contextlib.suppress(BusTimeout):  # cut off: no message comes
            # every message under way on the connection arrives before this does
            await self._bus.flush(STOP_S)
        self._active = False

    def _hear(self, endpoint: Endpoint, envelope: Envelope) -> None:
        if self._active:
            self._bus.hand_over(endpoint, envelope)


class SimBus:
    """One connection of one process. A handler that raises ends the run."""

    tenants = EVERY

    def __init__(self, link: Link) -> None:
        self.link = link
        self.counters = link.counters
        self._broker = link.broker
        self._loop = link.broker.loop
        self._context = link.context()  # for answers
        self.requests: KeyValue = SimKeyValue(self, self._broker.requests)
        self.bodies: KeyValue = SimKeyValue(self, self._broker.bodies)
        self.usage: KeyValue = SimKeyValue(self, self._broker.usage)
        self.history: KeyValue = SimKeyValue(self, self._broker.history)
        self.leases: KeyValue = SimKeyValue(self, self._broker.leases)
        self.acks: Log = SimLog(self, self._broker.acks)

    async def publish(
        self,
        subject: str,
        msg: Struct,
        *,
        headers: Mapping[str, str] | None = None,
        json: bool = False,
    ) -> None:
        await self.link.sendable()
        if self._broker.chance(self._broker.faults.publish_yields):
            await asyncio.sleep(0)
        payload = self._checked(subject, codec.encode(msg, json=json))
        self._tell("->", subject, msg)
        self.link.up(
            self._broker.route,
            Envelope(subject, payload, codec.with_content_type(headers, json=json)),
        )

    async def request(
        self,
        subject: str,
        msg: Struct,
        kind: type[T] | UnionType,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        await self.link.sendable()
        payload = self._checked(subject, codec.encode(msg, json=False))
        self._tell("?>", subject, msg)
        answer: asyncio.Future[Envelope] = self._loop.create_future()
        settle = functools.partial(_settle, answer)

        def on_answer(back: Envelope) -> None:
            self.link.deliver(settle, back, self._context)

        self.link.up(
            self._ask,
            Envelope(subject, payload, dict(headers) if headers else None, on_answer),
            settle,
        )
        back = await self._within(timeout_s, answer, subject)
        typed: T = codec.answer(kind, back.payload, back.headers)
        self._tell("=>", subject, typed)
        return typed

    async def subscribe(
        self, subject: str, kind: Any, handler: Handler, *, queue: str = ""
    ) -> Subscription:
        """Subscribe; the subscription is in force when this returns. Raises BusTimeout."""
        await self.link.sendable()
        subscription = SimSubscription(self, [Endpoint(subject, subject, kind, handler, queue)])
        await self.flush(STORE_S)
        return subscription

    async def serve(
        self, name: str, endpoints: Sequence[Endpoint], metadata: Mapping[str, str]
    ) -> Subscription:
        """Serve; the endpoints are in force when this returns. The services API's own subjects are
        not served here. Raises BusTimeout.
        """
        await self.link.sendable()
        subscription = SimSubscription(self, endpoints)
        await self.flush(STORE_S)
        return subscription

    async def flush(self, timeout_s: float) -> None:
        await self.link.sendable()
        pong: asyncio.Future[None] = self._loop.create_future()
        self.link.up(self.link.down, _settle, (pong, None), self._context)
        await self._within(timeout_s, pong, "flush")

    async def server_unix_s(self) -> float:
        return await self.operate("time", self._broker.clock.unix_s)

    # ------------------------------------------------------------ for its subscriptions and stores

    def hand_over(self, endpoint: Endpoint, envelope: Envelope) -> None:
        call = SimCall(self, envelope)
        if endpoint.gate is not None and (refused := endpoint.gate(call)) is not None:
            self.answer(envelope, refused, json=call.json)
            return
        try:
            msg = codec.received(endpoint.kind, envelope.subject, envelope.payload, json=call.json)
        except PeerError as error:
            self.counters.bad_payloads += 1
            self._broker.note(self.link.name, f"bad {envelope.subject} {error!r:.300}")
            self.answer(envelope, codec.refusal(error), json=call.json)
            return
        self._tell("<-", envelope.subject, msg)
        endpoint.handler(msg, call)

    def answer(self, envelope: Envelope, msg: Struct, *, json: bool) -> None:
        if envelope.answers is None:
            return
        headers = codec.with_content_type(
            codec.refusal_headers(msg) if isinstance(msg, Refused) else None, json=json
        )
        self.link.up(
            envelope.answers, Envelope(envelope.subject, codec.encode(msg, json=json), headers)
        )

    async def operate(self, what: str, act: Callable[[], T], payload_bytes: int | None = None) -> T:
        """Let the broker run `act`: at one instant, if at all. Raises what `act` raises, and
        BusTimeout. `payload_bytes`: those of a write, for which the broker needs room.
        """
        await self.link.sendable()
        if payload_bytes is not None:
            if payload_bytes > MAX_PAYLOAD_BYTES:
                raise BusError(f"{what}: {payload_bytes} bytes are over {MAX_PAYLOAD_BYTES}")
            act = functools.partial(self._if_room, act)
        result: asyncio.Future[T] = self._loop.create_future()
        broker, faults = self._broker, self._broker.faults
        if broker.chance(faults.store_lost):
            broker.note(self.link.name, f"{what}: lost")
        elif broker.chance(faults.store_late):
            self.link.later(
                STORE_S + faults.store_late_s * broker.rng.random(), self._perform, what, act, None
            )
        else:
            self.link.up(
                self._perform, what, act, None if broker.chance(faults.store_silent) else result
            )
        return await self._within(STORE_S, result, what)

    def _if_room(self, act: Callable[[], T]) -> T:
        if self._broker.full:
            raise StoreFull("the disk is full")
        return act()

    def _perform(self, what: str, act: Callable[[], T], result: "asyncio.Future[T] | None") -> None:
        """Run `act` at the broker, if it is up. Without `result` its outcome reaches nobody."""
        if self._broker.down:
            return
        done: T | SlacklineError
        try:
            done = act()
        except SlacklineError as error:
            done = error
        heard = "" if result else " (unheard)"
        if isinstance(done, SlacklineError):  # kept, it would keep the frames of its traceback
            self._broker.note(self.link.name, f"{what}: {done!r:.120}{heard}")
        else:
            self._broker.note(self.link.name, "{}: {!r:.120}{}", what, done, heard)
        if result is not None:
            self.link.down(_settle, (result, done), self._context)

    def _ask(self, envelope: Envelope, settle: Callable[[object], None]) -> None:
        if not self._broker.route(envelope):
            self.link.down(
                settle, (NoResponders(f"nobody serves {envelope.subject}"),), self._context
            )

    async def _within(self, timeout_s: float, future: "asyncio.Future[T]", what: str) -> T:
        timer = self._loop.call_later(timeout_s, _give_up, future, what, timeout_s)
        try:
            return await future
        finally:
            timer.cancel()

    def _checked(self, subject: str, payload: bytes) -> bytes:
        if not _SUBJECT.fullmatch(subject):
            raise PeerError(f"{subject!r} is not a subject", code="invalid_id")
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise BusError(f"{len(payload)} bytes for {subject} are over {MAX_PAYLOAD_BYTES}")
        return payload

    def _tell(self, direction: str, subject: str, msg: object) -> None:
        self._broker.note(self.link.name, "{} {} {!r:.300}", direction, subject, msg)


class SimKeyValue:
    """A bucket as one connection uses it."""

    def __init__(self, bus: SimBus, state: BucketState) -> None:
        self._bus = bus
        self._state = state
        self._now_s = bus.link.broker.loop.time

    async def get(self, key: str) -> Entry | None:
        return await self._operate("get", key, lambda: self._state.get(key, now_s=self._now_s()))

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        return await self._operate(
            "create",
            key,
            lambda: self._state.create(key, value, ttl_s, now_s=self._now_s()),
            len(value),
        )

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        return await self._operate(
            f"update from {revision}",
            key,
            lambda: self._state.update(key, value, revision, ttl_s, now_s=self._now_s()),
            len(value),
        )

    async def delete(self, key: str) -> None:
        await self._operate("delete", key, lambda: self._state.delete(key, now_s=self._now_s()))

    async def names(self) -> Sequence[str]:
        return await self._bus.operate(
            f"names {self._state.name}", lambda: self._state.names(now_s=self._now_s())
        )

    async def scan(self, prefix: str, since: int = 1) -> Sequence[tuple[str, Entry]]:
        if prefix and not prefix.endswith("."):
            raise PeerError(f"{prefix!r} is not a prefix of whole tokens", code="invalid_id")
        return await self._bus.operate(
            f"scan {self._state.name} {prefix}",
            lambda: self._state.scan(prefix, since, now_s=self._now_s()),
        )

    async def _operate(
        self, verb: str, key: str, act: Callable[[], T], payload_bytes: int | None = None
    ) -> T:
        if not _KEY.fullmatch(key):
            raise PeerError(f"{key!r} is not a key", code="invalid_id")
        return await self._bus.operate(f"{verb} {self._state.name} {key}", act, payload_bytes)


class SimLog:
    """The log as one connection uses it."""

    def __init__(self, bus: SimBus, state: LogState) -> None:
        self._bus = bus
        self._state = state

    async def append(self, subject: str, payload: bytes, expected_last: int) -> int:
        act = functools.partial(self._state.append, subject, payload, expected_last)
        return await self._bus.operate(f"append {subject} after {expected_last}", act, len(payload))

    async def last(self, subject: str) -> tuple[int, bytes] | None:
        return await self._bus.operate(f"last {subject}", lambda: self._state.last(subject))

    async def read(self, subject: str, after: int = 0) -> Sequence[tuple[int, bytes]]:
        return await self._bus.operate(
            f"read {subject} after {after}", lambda: self._state.read(subject, after)
        )

    async def trim(self, subject: str, below: int) -> None:
        await self._bus.operate(
            f"trim {subject} below {below}", lambda: self._state.trim(subject, below)
        )


def _settle(future: "asyncio.Future[Any]", result: object) -> None:
    if future.done():
        return
    if isinstance(result, SlacklineError):
        future.set_exception(result)
    else:
        future.set_result(result)


def _give_up(future: "asyncio.Future[Any]", what: str, timeout_s: float) -> None:
    if not future.done():
        future.set_exception(BusTimeout(f"{what}: no answer within {timeout_s:g} s"))
