"""A simulated NATS broker in virtual time: it carries messages and keeps durable state, with faults
drawn from a seed.

A message travels two hops, connection to broker and broker to connection. Each hop keeps the order,
as NATS does; routing and durable operations happen at the broker between the two. Further faults
(`Faults`) are switched on one by one. While a connection is away, messages of its client wait and
leave on its return, as in nats-py, even when the client has long given up. Messages under way are
lost, and the subscriptions of the connection are gone until it is back.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from dataclasses import dataclass
from typing import Any, NamedTuple

from shared import subjects
from shared.bus.api import LEASE_TTL_S, Counters
from tests.simulated.process import SimProcess, VirtualClock, virtual_loop
from tests.simulated.routes import Routes
from tests.simulated.store import BucketState, LogState

RECONNECT_SPREAD_S = 0.5  # after a restart each client returns at a random instant within this time


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of a run, as probabilities per message or operation; 0 is off. The defaults are a
    healthy NATS on one machine.
    """

    latency_s: tuple[float, float] = (0.00005, 0.0003)  # of one hop, uniform
    # a hop takes `spike_s` more, and every later message of the connection waits behind it
    spike: float = 0.0
    spike_s: float = 0.05
    loss: float = 0.0  # a delivery of a core message does not arrive
    duplicate: float = 0.0  # it arrives twice (harsher than NATS)
    reorder: float = 0.0  # later ones within `reorder_s` overtake it (harsher than NATS)
    reorder_s: float = 0.01
    store_lost: float = 0.0  # a durable operation does not happen, and times out
    store_silent: float = 0.0  # the operation happens, and times out
    store_late: float = 0.0  # it times out, and happens up to `store_late_s` later
    store_late_s: float = 1.0
    # publish lets other tasks run before it sends, as when the socket is behind
    publish_yields: float = 0.0


class Envelope(NamedTuple):
    """A message under way that is not stored. `answers` receives the reply to it, at the broker."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None = None
    answers: "Callable[[Envelope], None] | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Listening:
    """A subscription at the broker. `hear` runs in `context`, inside the process."""

    subject: str
    queue: str
    link: "Link"
    hear: Callable[[Envelope], None]
    context: Context


class Broker:
    """A broker on the running virtual loop. `faults` may be replaced during a run: a calm end lets
    the fleet settle.
    """

    def __init__(
        self, rng: random.Random, faults: Faults | None = None, *, trace_lines: int = 0
    ) -> None:
        self.loop = virtual_loop()
        self.rng = rng
        self.faults = faults or Faults()
        self.clock = VirtualClock(self.loop)
        self.requests = BucketState(subjects.REQUESTS_BUCKET)
        self.bodies = BucketState(subjects.BODIES_BUCKET)
        self.usage = BucketState(subjects.USAGE_BUCKET)
        self.history = BucketState(subjects.HISTORY_BUCKET)
        self.leases = BucketState(subjects.LEASES_BUCKET, LEASE_TTL_S)
        self.acks = LogState("acks")
        # the instant, who, what as a format, and what it shows
        self.trace: deque[tuple[float, str, str, tuple[object, ...]]] | None = (
            deque(maxlen=trace_lines) if trace_lines else None
        )
        self.routes: Routes[Listening] = Routes(rng)
        self.messages = 0  # core messages that reached the broker
        self._up_at_s = 0.0
        self._room_at_s = 0.0
        self._links: dict[Link, None] = {}

    @property
    def down(self) -> bool:
        return self.loop.time() < self._up_at_s

    def restart_broker(self, down_s: float) -> None:
        """Kill the broker and bring it back after `down_s`. Durable state stays, and its TTLs go on
        meanwhile.
        """
        self.note("broker", f"down for {down_s:g} s")
        self._up_at_s = self.loop.time() + down_s
        for link in self._links:
            link.cut(self.returns_at_s())

    @property
    def full(self) -> bool:
        """True while the disk takes no writes."""
        return self.loop.time() < self._room_at_s

    def fill(self, for_s: float) -> None:
        """Refuse every write but deletes for so long, as a server on a full disk does."""
        self.note("broker", f"full for {for_s:g} s")
        self._room_at_s = self.loop.time() + for_s

    def cut(self, name: str, down_s: float) -> None:
        """Break the connections of this name for `down_s`; their processes live on."""
        for link in self._links:
            if link.name == name:
                link.cut(max(self.loop.time() + down_s, self.returns_at_s()))

    def inject(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        """Put a message of no connection to the broker now."""
        self.route(Envelope(subject, payload, headers))

    def note(self, who: str, what: str, *shown: object) -> None:
        """Add a line to the story; tests add their own events. `shown` are put into `what`, a
        format, when the story is told, which is seldom: they stay as they are until then.
        """
        if self.trace is not None:
            self.trace.append((self.loop.time(), who, what, shown))

    def story(self) -> str:
        return "\n".join(
            f"{at_s:12.6f} {who:<16} {what.format(*shown) if shown else what}"
            for at_s, who, what, shown in self.trace or ()
        )

    def hop_s(self) -> float:
        """The drawn duration of one hop."""
        faults, rng = self.faults, self.rng
        low_s, high_s = faults.latency_s
        delay_s = low_s + (high_s - low_s) * rng.random()
        return delay_s + faults.spike_s * rng.random() if self.chance(faults.spike) else delay_s

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.rng.random() < probability

    def route(self, envelope: Envelope) -> bool:
        """Hand a message to the subscriptions of its subject; False where there are none."""
        self.messages += 1
        listeners = self.routes.pick(envelope.subject)
        for listening in listeners:
            listening.link.deliver(listening.hear, envelope, listening.context)
        return bool(listeners)

    def join(self, link: "Link") -> None:
        self._links[link] = None

    def leave(self, link: "Link") -> None:
        self._links.pop(link, None)

    def ready_at_s(self) -> float:
        """The instant at which a client that connects now is connected: at once, unless the broker
        is down.
        """
        return self.returns_at_s() if self.down else 0.0

    def returns_at_s(self) -> float:
        """The instant at which a client that is cut off now is back: it waits for the broker and
        then for a while of its own.
        """
        return max(self._up_at_s, self.loop.time()) + RECONNECT_SPREAD_S * self.rng.random()


class Link:
    """The two hops of one connection. Within one direction, messages arrive as they were sent."""

    def __init__(
        self, broker: Broker, name: str, process: SimProcess | None, *, back_at_s: float
    ) -> None:
        self.broker = broker
        self.name = name
        self.counters = Counters()
        self._process = process
        self._loop = broker.loop
        self._closed = False
        self._generation = 0  # messages of an earlier generation are lost
        self._back_at_s = back_at_s
        self._up_busy_s = 0.0
        self._down_busy_s = 0.0
        self._wanted: dict[Listening, None] = {}  # the client's subscriptions
        self._known: dict[Listening, None] = {}  # those that the broker knows
        self._outside = Context()
        broker.join(self)
        if process is not None:
            process.on_change.append(self._on_process)

    def context(self) -> Context:
        """The context for a callback of the connection: inside its process."""
        return copy_context() if self._process is None else self._process.context()

    async def sendable(self) -> None:
        """Wait until the client may send. A connection that ended never answers: its process is
        dead and does not get past this.
        """
        if self._closed:
            await self._loop.create_future()

    def up(self, arrive: Callable[..., object], *args: Any) -> None:
        """Let `arrive(*args)` run at the broker."""
        at_s = max(self._loop.time(), self._back_at_s) + self.broker.hop_s()
        self._up_busy_s = at_s = max(at_s, self._up_busy_s)
        self._loop.call_at(
            at_s, self._arrive_up, self._generation, arrive, args, context=self._outside
        )

    def later(self, delay_s: float, act: Callable[..., object], *args: Any) -> None:
        """Let `act(*args)` run at the broker after `delay_s`, whatever happens to the
        connection.
        """
        self._loop.call_later(delay_s, act, *args, context=self._outside)

    def down(
        self,
        arrive: Callable[..., object],
        args: tuple[Any, ...],
        context: Context,
        *,
        late_s: float = 0.0,
    ) -> None:
        """Let `arrive(*args)` run at the client. With `late_s`, later messages may overtake it."""
        now_s = self._loop.time()
        if now_s < self._back_at_s:
            return
        at_s = now_s + self.broker.hop_s() + late_s
        if not late_s:
            self._down_busy_s = at_s = max(at_s, self._down_busy_s)
        self._loop.call_at(at_s, self._arrive_down, self._generation, arrive, args, context=context)

    def deliver(
        self, hear: Callable[[Envelope], None], envelope: Envelope, context: Context
    ) -> None:
        """Deliver a core message to the client, with the faults of the moment."""
        broker, faults = self.broker, self.broker.faults
        if broker.chance(faults.loss):
            broker.note(self.name, f"lost: {envelope.subject}")
            return
        late_s = faults.reorder_s * broker.rng.random() if broker.chance(faults.reorder) else 0.0
        self.down(hear, (envelope,), context, late_s=late_s)
        if broker.chance(faults.duplicate):
            broker.note(self.name, f"doubled: {envelope.subject}")
            self.down(hear, (envelope,), context, late_s=faults.reorder_s * broker.rng.random())

    def listen(self, listening: Listening) -> None:
        """Subscribe: in force once this has arrived at the broker, and again after each return."""
        self._wanted[listening] = None
        self.up(self._add, listening)

    def unlisten(self, listening: Listening) -> None:
        self._wanted.pop(listening, None)
        self.up(self._remove, listening)

    def cut(self, back_at_s: float) -> None:
        """Lose the messages under way; be back at that instant."""
        self.broker.note(self.name, f"cut off until {back_at_s:.6f}")
        self._generation += 1
        self._back_at_s = back_at_s
        self.counters.disconnects += 1
        self._silence()
        self._loop.call_at(
            back_at_s, self._arrive_up, self._generation, self._return, (), context=self._outside
        )

    def _return(self) -> None:
        self.counters.reconnects += 1
        for listening in self._wanted:
            self._add(listening)

    def _on_process(self, what: str) -> None:
        self.broker.note(self.name, what)
        if what == "killed" and self.broker.rng.random() < 0.5:
            self._generation += 1  # its last messages had not left its own buffer
        if what in ("killed", "exited"):
            self._closed = True
            self.up(self._silence)
            self.broker.leave(self)

    def _add(self, listening: Listening) -> None:
        self._known[listening] = None
        self.broker.routes.add(listening)

    def _remove(self, listening: Listening) -> None:
        self._known.pop(listening, None)
        self.broker.routes.remove(listening)

    def _silence(self) -> None:
        for listening in tuple(self._known):
            self._remove(listening)

    def _arrive_up(
        self, generation: int, arrive: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if generation == self._generation:
            arrive(*args)

    def _arrive_down(
        self, generation: int, arrive: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        if generation == self._generation and not self._closed:
            arrive(*args)
