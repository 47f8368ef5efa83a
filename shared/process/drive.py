"""The loop of a service whose decisions a core makes: wait for an event or the next wake-up, feed
the core, perform its actions.

Planner, admission and relegation run this loop; the simulator feeds the same cores. The worker does
not: its core has no timers, follows the engine's iterations, and answers by return value.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from shared.clock import Clock
from shared.core.tick import Tick
from shared.process.audit import Audit

E = TypeVar("E")
A = TypeVar("A")
EventIn = TypeVar("EventIn", contravariant=True)
ActionOut = TypeVar("ActionOut", covariant=True)

# Turns of the event loop until a message has left that an action sends from a task of its own: one
# each for that task, the bus's writer and the socket.
TURNS_TO_SOCKET = 3


class Core(Protocol[EventIn, ActionOut]):
    """A synchronous object that decides: an event and an instant go in, actions come out."""

    @property
    def idle(self) -> bool:
        """True if nothing is promised or under way, so that the service may end."""

    def wake_at_unix_s(self) -> float | None:
        """The instant at which the core wants a Tick if no event comes before; None if never."""

    def handle(self, event: EventIn, *, now_unix_s: float) -> Sequence[ActionOut]:
        """The actions, in order. Due timers fire with every event. A core that is due again at once
        has put off work until its actions' messages have left.
        """

    def check(self) -> None:
        """Raises AssertionError unless the books balance."""


class Inbox(Generic[E]):
    """The events that wait for a core, in order, up to a limit. When full, `offer` refuses an
    event, and its caller decides. `put` never refuses: it is for results of the core's own actions.
    """

    def __init__(self, limit: int, join: Callable[[E, deque[E]], E] | None = None) -> None:
        """`join(first, rest)` returns the first event together with those that follow it directly
        and belong to it; it takes these from the left of `rest`.
        """
        self._limit = limit
        self._join = join
        self._events: deque[E] = deque()
        self._failure: Exception | None = None
        self._arrival: asyncio.Future[None] | None = None
        self.draining = False

    def __len__(self) -> int:
        return len(self._events)

    def offer(self, event: E) -> bool:
        """Add the event; False if the inbox is full and the event was not added."""
        if len(self._events) >= self._limit:
            return False
        self.put(event)
        return True

    def put(self, event: E) -> None:
        """Add an event that must not be lost; the caller bounds the number of such events."""
        self._events.append(event)
        self._wake()

    def drain(self) -> None:
        """No further work comes: the driver returns once the core is idle."""
        self.draining = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """The driver raises this error next, before it handles any event that waits."""
        self._failure = error
        self._wake()

    def take(self) -> E | None:
        """The next event; None if there is none. Raises the error that `fail` was given."""
        if self._failure is not None:
            raise self._failure
        if not self._events:
            return None
        event = self._events.popleft()
        return event if self._join is None else self._join(event, self._events)

    async def wait(self, longest_s: float | None) -> None:
        """Return when there is something to take, or after that long."""
        loop = asyncio.get_running_loop()
        self._arrival = loop.create_future()
        timer = None if longest_s is None else loop.call_later(longest_s, self._wake)
        try:
            await self._arrival
        finally:
            self._arrival = None
            if timer is not None:
                timer.cancel()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


async def drive(
    core: Core[E | Tick, A],
    inbox: Inbox[E],
    perform: Callable[[A], Awaitable[None]],
    clock: Clock,
    *,
    name: str,
    on_step: Callable[[float], None] | None = None,
) -> None:
    """Feed `core` until it is idle with a draining inbox, or until cancelled.

    Events go in as they came, and a Tick at the instant that the core asked for, never before.
    `perform` is awaited for each action before the next event; it may start a task, whose result
    returns as an event. `on_step` gets each step's seconds. Raises the error that `Inbox.fail` was
    given or that `perform` raises, and AssertionError (see Audit).
    """
    audit = Audit(core, name, clock)
    # when the last event was handled; None: the event loop has had a turn since
    handled_unix_s: float | None = None
    while True:
        event: E | Tick | None = inbox.take()
        if event is None:
            if inbox.draining and core.idle:
                return
            wake_unix_s = core.wake_at_unix_s()
            if wake_unix_s is None or wake_unix_s > clock.unix_s():
                audit.look(idle=core.idle)
                # a timer of the loop may come a little early: then the driver waits again
                await inbox.wait(None if wake_unix_s is None else wake_unix_s - clock.unix_s())
                handled_unix_s = None
                continue
            if handled_unix_s is not None and wake_unix_s <= handled_unix_s:
                # due again at once: the messages of the last event leave first
                for _ in range(TURNS_TO_SOCKET):
                    await asyncio.sleep(0)
                handled_unix_s = None
                continue
            event = Tick()
        handled_unix_s = clock.unix_s()
        actions = core.handle(event, now_unix_s=handled_unix_s)
        if on_step is not None:
            on_step(clock.unix_s() - handled_unix_s)
        for action in actions:
            await perform(action)
