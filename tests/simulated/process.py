"""Simulated processes of a fleet, within one OS process: tests kill, pause and resume them.

Every task, timer and callback scheduled from inside a process's context belongs to the process. A
pause is a SIGSTOP: nothing of the process runs, its timers fire late, its messages wait. A kill is
a pause that never ends, after its connections are cut: its tasks stay frozen until the run is over,
so that none of their cleanup reaches another process.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

from shared.clock import Clock
from tests.simulated.virtual_loop import OWNER, Owner, VirtualTimeLoop

T = TypeVar("T")

EPOCH_UNIX_S = 1_700_000_000.0  # wall-clock time at virtual time 0


class VirtualClock(Clock):
    """shared.clock.Clock on virtual time. The wall clock of its host is off by `skew_s`, which a
    test may change.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, skew_s: float = 0.0) -> None:
        self.skew_s = skew_s
        super().__init__(loop.time, loop.time)

    def _read_offset_s(self) -> float:
        return EPOCH_UNIX_S + self.skew_s  # exactly


def virtual_loop() -> VirtualTimeLoop:
    """The running loop. Raises RuntimeError if it is not a virtual one."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        raise RuntimeError("simulated processes live on a VirtualTimeLoop: use run_virtual")
    return loop


class SimProcess(Owner):
    """One process of the fleet. After a kill, make a new one under the same name.

    `on_exit` is called at every end: main's return, its exception (`failure`), a kill. Without it
    an exception ends the run.
    """

    def __init__(
        self,
        name: str,
        *,
        skew_s: float = 0.0,
        on_exit: Callable[["SimProcess"], None] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.alive = True
        self.failure: BaseException | None = None
        self.exited = asyncio.Event()
        # called with "paused", "resumed", "killed", "exited"
        self.on_change: list[Callable[[str], None]] = []
        self._loop = virtual_loop()
        self._on_exit = on_exit
        self._outside = copy_context()  # the maker's context, for `on_exit`
        self.clock = VirtualClock(self._loop, skew_s)

    @property
    def paused(self) -> bool:
        return self.alive and self.held

    def context(self) -> Context:
        """A new context inside the process."""
        context = copy_context()
        context.run(OWNER.set, self)
        return context

    def start(self, main: Coroutine[Any, Any, Any]) -> None:
        """Run the process's main; the process ends with it."""
        task = self.spawn(main, name=f"{self.name}.main")
        task.add_done_callback(self._main_ended, context=self._outside)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> "asyncio.Task[T]":
        """Start a task inside the process, beside its main. It never ends if the process is killed
        first.
        """
        return self._loop.create_task(coro, name=name, context=self.context())

    def pause(self) -> None:
        if self.alive and not self.held:
            self._loop.hold(self)
            self._notify("paused")

    def resume(self) -> None:
        if self.paused:
            self._loop.let_go(self)
            self._notify("resumed")

    def kill(self) -> None:
        """End the process at once, without any cleanup. Called from within, the present step still
        runs up to its next await.
        """
        self._end("killed")

    def _main_ended(self, task: "asyncio.Task[Any]") -> None:
        if self.alive and not self._loop.closing:
            self.failure = None if task.cancelled() else task.exception()
            self._end("exited")

    def _end(self, how: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self._loop.hold(self)
        self._notify(how)
        self.exited.set()
        self._loop.call_soon(self._report_end, context=self._outside)

    def _report_end(self) -> None:
        if self._loop.closing:
            return
        if self._on_exit is not None:
            self._on_exit(self)
        elif self.failure is not None:
            self._loop.fail(self.failure)

    def _notify(self, what: str) -> None:
        for listener in tuple(self.on_change):
            listener(what)
