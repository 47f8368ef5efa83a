"""Tests of the loop that feeds a service's core, on virtual time: the order of events, when Ticks
come, and what ends the loop.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from shared.core.tick import Tick
from shared.process.audit import IDLE_S, Audit
from shared.process.drive import TURNS_TO_SOCKET, Inbox, drive
from tests.simulated.process import VirtualClock
from tests.simulated.virtual_loop import run_virtual, virtual

T0 = 1024.0  # virtual time of the start; a power of two, so that sums on the 1/64 s grid are exact
STEP = 1 / 64


class PlainClock(VirtualClock):
    """Virtual time itself, without an epoch: instants of the tests are exact."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop())
        self._offset_s = 0.0


@dataclass
class Diary:
    """A core that writes down what it is fed, and wakes when it was told to."""

    clock: PlainClock
    wakes: list[float] = field(default_factory=list)
    fed: list[tuple[float, object]] = field(default_factory=list)
    idle: bool = True
    balanced: bool = True
    puts_off: object = None  # at this event it leaves its timer for the next one

    def wake_at_unix_s(self) -> float | None:
        return min(self.wakes, default=None)

    def handle(self, event: object, *, now_unix_s: float) -> Sequence[object]:
        self.fed.append((now_unix_s, event))
        if event != self.puts_off:
            self.wakes = [at for at in self.wakes if at > now_unix_s]
        return [("did", event)]

    def check(self) -> None:
        assert self.balanced, "a slot is lost"


async def nothing(_: object) -> None:
    pass


def run(play: Callable[[Diary, Inbox[object]], object], limit: int = 100, **more: object) -> Diary:
    """`play` sets timers and feeds; one virtual minute later the driver is cancelled."""
    diaries: list[Diary] = []

    async def main() -> None:
        diary, inbox = Diary(PlainClock()), Inbox[object](limit)
        diaries.append(diary)
        play(diary, inbox)
        driver = asyncio.create_task(drive(diary, inbox, nothing, diary.clock, name="t"))
        await asyncio.wait((driver,), timeout=60.0)
        if driver.done():
            driver.result()
        driver.cancel()

    run_virtual(main(), start_s=T0)
    return diaries[0]


def at(seconds: float, what: Callable[..., object], *args: object) -> None:
    asyncio.get_running_loop().call_at(T0 + seconds, what, *args)


# ---------------------------------------------------------------- events and Ticks


@virtual(start_s=T0)
async def test_a_wake_up_that_the_core_moves_forward_or_takes_back_is_followed():
    class Moves(Diary):
        def handle(self, event: object, *, now_unix_s: float) -> Sequence[object]:
            if isinstance(event, list):
                self.wakes = event
            return super().handle(event, now_unix_s=now_unix_s)

    diary, inbox = Moves(PlainClock(), wakes=[T0 + 1.0]), Inbox[object](9)
    at(STEP, inbox.offer, [T0 + 2 * STEP])
    at(3 * STEP, inbox.offer, [])
    driver = asyncio.create_task(drive(diary, inbox, nothing, diary.clock, name="t"))
    await asyncio.sleep(9.0)
    driver.cancel()
    assert [(at_s - T0, type(e).__name__) for at_s, e in diary.fed] == [
        (STEP, "list"),
        (2 * STEP, "Tick"),
        (3 * STEP, "list"),
    ]


@virtual(start_s=T0)
async def test_work_that_the_core_puts_off_waits_until_what_it_sent_has_left():
    """After the answer to a hold the plan waits; a plan whose time comes does not."""
    diary, inbox = Diary(PlainClock(), puts_off="held"), Inbox[object](9)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def perform(action: object) -> None:
        seen.append((action, turns))

    seen: list[tuple[object, int]] = []
    inbox.offer("held")
    diary.wakes = [T0]
    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    driver = asyncio.create_task(drive(diary, inbox, perform, diary.clock, name="t"))
    while len(seen) < 2:
        await asyncio.sleep(0)
    counting.cancel()
    driver.cancel()
    (held, first), (ticked, second) = seen
    assert (held, ticked) == (("did", "held"), ("did", Tick()))
    assert second - first == TURNS_TO_SOCKET


# ---------------------------------------------------------------- the inbox


@virtual()
async def test_a_full_inbox_declines_what_is_offered_and_takes_what_is_put():
    inbox = Inbox[object](2)
    assert [inbox.offer(n) for n in range(3)] == [True, True, False]
    inbox.put("a result")
    assert not inbox.offer("still full")
    assert [inbox.take(), inbox.take()] == [0, 1]
    assert inbox.offer("room again")
    assert [inbox.take() for _ in range(3)] == ["a result", "room again", None]


def test_a_join_takes_what_follows_and_nothing_overtakes():
    def together(first: object, rest: deque[object]) -> object:
        while rest and isinstance(first, str) and isinstance(rest[0], str):
            first += str(rest.popleft())
        return first

    inbox = Inbox[object](9, together)
    for event in ("a", "b", 1, "c", 2, 3, "d", "e"):
        inbox.offer(event)
    assert [inbox.take() for _ in range(6)] == ["ab", 1, "c", 2, 3, "de"]


@virtual(start_s=T0)
async def test_a_cancelled_driver_stops_between_events_and_leaves_the_rest_in_the_inbox():
    diary, inbox = Diary(PlainClock()), Inbox[object](9)

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    driver = asyncio.create_task(drive(diary, inbox, never, diary.clock, name="t"))
    inbox.offer(1)
    inbox.offer(2)
    await asyncio.sleep(1.0)
    driver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await driver
    assert ([event for _, event in diary.fed], len(inbox)) == ([1], 1)


@virtual(start_s=T0)
async def test_a_draining_inbox_lets_the_core_finish():
    diary, inbox = Diary(PlainClock(), idle=False), Inbox[object](9)
    at(1.0, inbox.drain)
    at(2.0, inbox.put, "a result")

    async def perform(action: object) -> None:
        diary.idle = True

    await drive(diary, inbox, perform, diary.clock, name="t")
    assert asyncio.get_running_loop().time() == T0 + 2.0


# ---------------------------------------------------------------- the books


def test_a_core_is_checked_while_nothing_waits_for_it():
    checked: list[float] = []

    def play(diary: Diary, inbox: Inbox[object]) -> None:
        diary.check = lambda: checked.append(diary.clock.unix_s() - T0)  # type: ignore[method-assign]
        for n in range(1, 59):
            at(n, inbox.offer, n)

    run(play)
    assert checked == [IDLE_S * n for n in range(1, 6)]


def test_checks_that_take_long_come_rarely():
    now_s, checks = 0.0, 0

    class SlowClock:
        def unix_s(self) -> float:
            return now_s

    class Large:
        def check(self) -> None:
            nonlocal now_s, checks
            checks += 1
            now_s += 0.1

    audit = Audit(Large(), "pool", SlowClock())  # type: ignore[arg-type]
    while now_s < 1000.0:
        audit.look(idle=True)
        now_s += 0.5
    assert checks == math.ceil(1000.0 / 100.0)


def test_broken_books_end_the_driver_and_say_so():
    def play(diary: Diary, inbox: Inbox[object]) -> None:
        diary.balanced = False
        at(IDLE_S, inbox.offer, "anything")

    with capture_logs() as logs, pytest.raises(AssertionError, match="a slot is lost"):
        run(play)
    (line,) = logs
    assert (line["event"], line["log_level"], line["core"]) == ("core.broken", "error", "t")
    assert isinstance(line["exc_info"], AssertionError)
