"""Limits each of a task's waits by one timer; a timer for each would take 6 us, twice a token."""

import asyncio
import math


class Deadline:
    """Stands as `with deadline:` around each wait of a task. A wait longer than `limit_s` (None: no
    limit) raises TimeoutError. A timer that fires sets itself anew for the wait under way.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[object] | None = None
        self._began_at_s = math.inf  # of the wait that is under way; inf: there is none
        self._set = False  # a timer is set
        self._passed = False
        self._cancelling = 0  # cancellations of the task that are not ours

    def __enter__(self) -> None:
        if self._limit_s is None:
            return
        if self._task is None:
            self._task = asyncio.current_task()
            assert self._task is not None, "a task waits"
        self._cancelling = self._task.cancelling()
        self._began_at_s = self._loop.time()
        if not self._set:
            self._set_timer(self._began_at_s + self._limit_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        self._began_at_s = math.inf
        if not self._passed:
            return
        self._passed = False
        assert self._task is not None
        if self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _set_timer(self, at_s: float) -> None:
        self._set = True
        self._loop.call_at(at_s, self._look)

    def _look(self) -> None:
        self._set = False
        if self._began_at_s == math.inf or self._passed:
            return
        assert self._limit_s is not None and self._task is not None
        due_at_s = self._began_at_s + self._limit_s
        if self._loop.time() < due_at_s:
            self._set_timer(due_at_s)
        else:
            self._passed = True
            self._task.cancel()
