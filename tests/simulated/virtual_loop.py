"""An asyncio event loop on virtual time: real service code runs in it without a network, an hour in
milliseconds.

`time()` stands still while callbacks run and jumps to the next timer when nothing is ready. Nothing
sleeps, no system call is made, and timers that share an instant run in the order in which they were
set. So a run depends only on its inputs, as long as the code walks no set of strings. A run in
which every task waits and no timer is set fails.

Every callback belongs to the `Owner` in whose context it was scheduled. The callbacks of a held
owner wait until the owner is let go.
"""

import asyncio
import functools
import heapq
import itertools
import math
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

T = TypeVar("T")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

BUSY_TURNS = 100_000  # turns of the loop at one instant; after so many, tasks spin
SHOWN_TASKS = 12  # tasks named in the message of a deadlock
CANCEL_ROUNDS = 50  # cancellations that a task may swallow before that is an error


class Owner:
    """The owner of callbacks: a simulated process. While it is `held`, its callbacks gather in
    `stash`, in order.
    """

    def __init__(self) -> None:
        self.held = False
        self.stash: deque[Call] = deque()


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class Call(asyncio.TimerHandle):
    """A callback that is due at an instant, and its owner. It is lighter than a handle of asyncio,
    which asks for the debug mode at every step: a run makes hundreds of thousands.
    """

    __slots__ = ("owner",)
    _callback: Callable[..., object] | None
    _context: Context

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: Context | None,
    ) -> None:
        self._when = when_s
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context = copy_context() if context is None else context
        self._cancelled = self._scheduled = False
        self._repr = self._source_traceback = None
        self.owner = context.get(OWNER)

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = None  # with what it refers to
        self._args = ()


class VirtualTask(asyncio.Task[Any]):
    """A task that hashes by its serial number, so that sets of tasks (in TaskGroup) are walked in
    the same order in every run.
    """

    def __init__(
        self,
        coro: Any,
        serial: int,
        *,
        loop: asyncio.AbstractEventLoop,
        name: str,
        context: Context | None,
    ) -> None:
        self._serial = serial
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._serial


class VirtualTimeLoop(asyncio.AbstractEventLoop):
    """A loop for one run; see `run_virtual`. An exception that nobody handles ends the run with
    that exception.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._ready: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._compact_at = 256  # at so many timers, cancelled ones are removed
        self._serials = itertools.count(1)
        # in order of creation; the list keeps tasks from the garbage collector's timing
        self._tasks: list[VirtualTask] = []
        self._prune_at = 256
        self._owners: dict[Owner, None] = {}
        self._failure: BaseException | None = None
        self._stopping = self._running = self._closing = self._closed = False

    # ------------------------------------------------------------ time and callbacks

    def time(self) -> float:
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = Call(self._now_s, callback, args, self, context)
        self._ready.append(call)
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        when_s = self._now_s + delay
        if delay > 0 and when_s == self._now_s:
            # a wait takes time, or rounding could spin for ever
            when_s = math.nextafter(when_s, math.inf)
        return self.call_at(when_s, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        call = Call(when, callback, args, self, context)
        timers = self._timers
        heapq.heappush(timers, (when, next(self._serials), call))
        if len(timers) > self._compact_at:
            timers[:] = [timer for timer in timers if not timer[2]._cancelled]
            heapq.heapify(timers)
            self._compact_at = 2 * len(timers) + 256
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run `func` at once: with threads the order would be random again."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        serial = next(self._serials)
        task = VirtualTask(
            coro,
            serial,
            loop=self,
            name=f"task-{serial}" if name is None else str(name),
            context=context,
        )
        self._tasks.append(task)
        if len(self._tasks) > self._prune_at:
            self._prune()
            self._prune_at = 2 * len(self._tasks) + 256
        return task

    def _prune(self) -> None:
        """Forget the tasks that ended; one whose exception nobody read then fails the run."""
        self._tasks = [task for task in self._tasks if not task.done()]

    # ------------------------------------------------------------ owners

    def hold(self, owner: Owner) -> None:
        """Stop all callbacks of the owner; time passes for it all the same."""
        owner.held = True
        self._owners[owner] = None

    def let_go(self, owner: Owner) -> None:
        """Run the gathered callbacks, in order, before all that the owner schedules from now on."""
        owner.held = False
        self._owners.pop(owner, None)
        self._ready.extendleft(reversed(owner.stash))
        owner.stash.clear()

    # ------------------------------------------------------------ running

    def run_until_complete(self, future: Any) -> Any:
        task = asyncio.ensure_future(future, loop=self)
        task.add_done_callback(lambda _: self.stop())
        self.run_forever()
        return task.result()

    def run_forever(self) -> None:
        """Run until `stop()`. Raises what a callback or a forgotten task raised; RuntimeError on a
        deadlock or a spinning task.
        """
        hooks = sys.get_asyncgen_hooks()
        self._running, self._stopping = True, False
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._finish_generator)
        try:
            self._run()
        finally:
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)
            self._running = False
        if not self._closing:
            self.raise_failure()

    def _run(self) -> None:
        ready, timers, turns = self._ready, self._timers, 0
        while True:
            turns += 1
            if not ready:
                if not self._jump():
                    return
                turns = 0
            elif turns > BUSY_TURNS:
                raise RuntimeError(f"tasks spin at {self._now_s:.6f} s, among them {ready[0]!r}")
            while timers and timers[0][0] <= self._now_s:
                ready.append(heapq.heappop(timers)[2])
            for _ in range(len(ready)):
                call = ready.popleft()
                if call._cancelled:
                    continue
                owner = call.owner
                if owner is not None and owner.held:
                    owner.stash.append(call)
                    continue
                try:
                    call._context.run(call._callback, *call._args)  # type: ignore[arg-type]
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler(
                        {"message": f"{call!r} failed", "exception": error, "handle": call}
                    )
                if self._stopping:
                    return

    def _jump(self) -> bool:
        """Jump to the next timer. False when the run is being closed: no time passes then."""
        if self._closing:
            return False
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        if not timers:
            waiting = [task.get_name() for task in self._tasks if not task.done()]
            more = f" and {len(waiting) - SHOWN_TASKS} more" if len(waiting) > SHOWN_TASKS else ""
            names = ", ".join(waiting[:SHOWN_TASKS])
            raise RuntimeError(
                f"every task waits and no timer is set, at {self._now_s:.6f} s: {names}{more}"
            )
        self._now_s = max(self._now_s, timers[0][0])
        return True

    def stop(self) -> None:
        self._stopping = True

    def fail(self, error: BaseException) -> None:
        """End the run with this error; the first one counts."""
        if self._failure is None:
            self._failure = error
        self._stopping = True

    def raise_failure(self) -> None:
        """Raises what `fail` was given, if anything."""
        if self._failure is not None:
            raise self._failure

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closing:
            self.fail(
                context.get("exception")
                or RuntimeError(f"{context['message']}: {context.get('task', '')!r}")
            )

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def close(self) -> None:
        """Cancel the tasks that are left, those of held owners included, and let them end without
        time passing. Their failures are ignored.

        Raises RuntimeError if a task does not end.
        """
        if self._closed:
            return
        self._prune()
        self._closing = True
        for _ in range(CANCEL_ROUNDS):
            left = [task for task in self._tasks if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            for owner in list(self._owners):
                self.let_go(owner)
            self.run_forever()
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.exception()  # read, so that asyncio does not complain about it later
        stuck = [task.get_name() for task in self._tasks if not task.done()]
        self._tasks.clear()
        if stuck:
            raise RuntimeError(
                f"cancelled {CANCEL_ROUNDS} times and still running: "
                f"{', '.join(stuck[:SHOWN_TASKS])}"
            )

    def _finish_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose(), name="aclose")

    @property
    def closing(self) -> bool:
        """True when the run is over and only cleanup still runs."""
        return self._closing

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def get_debug(self) -> bool:
        return False

    def set_debug(self, enabled: bool) -> None:
        """Ignored: there is no debug mode."""

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by asyncio.TimerHandle; cancelled timers are dropped when they come up."""

    async def shutdown_asyncgens(self) -> None:
        """Nothing to do: generators end with the tasks that use them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing to do: there is no executor."""


def run_virtual(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """The result of `main`, run on a new loop whose clock begins at `start_s` seconds; every other
    task is cancelled at its end.

    Raises what `main` raises, what nobody handled, and RuntimeError where no progress is possible.
    """
    if asyncio._get_running_loop() is not None:
        main.close()
        raise RuntimeError("run_virtual cannot be called while an event loop runs in this thread")
    # abstract: it has no sockets, signals or subprocesses
    loop = VirtualTimeLoop(start_s)  # type: ignore[abstract]
    try:
        result: T = loop.run_until_complete(main)
    finally:
        loop.close()
    loop.raise_failure()
    return result


def virtual(
    start_s: float = 0.0,
) -> Callable[[Callable[P, Coroutine[Any, Any, None]]], Callable[P, None]]:
    """A decorator for a test that runs on virtual time, from `start_s` seconds."""

    def decorated(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            run_virtual(test(*args, **kwargs), start_s=start_s)

        return run

    return decorated
