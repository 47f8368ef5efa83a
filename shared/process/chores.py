"""Runs the short tasks with which a service answers messages, and ends them with the service."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, TypeVar

import structlog

from shared.bus.api import Subscription
from shared.errors import BusError, PeerError

log = structlog.get_logger()

T = TypeVar("T")


class Chores:
    """A task group, and the subscriptions whose handlers start its tasks; these end first. A task's
    PeerError or BusError is logged, since whoever needs an answer asks again. Any other exception
    ends the service.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._subscriptions = AsyncExitStack()

    async def __aenter__(self) -> "Chores":
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._subscriptions.aclose()
        finally:
            await self._group.__aexit__(kind, error, trace)

    def start(self, coro: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Start a task whose failure ends the service."""
        return self._group.create_task(coro, name=name)

    def spawn(self, coro: Coroutine[Any, Any, Any], name: str) -> None:
        """Start a short task; drop it if the service is already ending."""
        answer = _or_log(coro, name)
        try:
            # close the coroutine even if it never began
            self._group.create_task(answer, name=name).add_done_callback(lambda _: coro.close())
        except RuntimeError:
            answer.close()
            coro.close()

    def listen(self, subscription: Subscription) -> Subscription:
        """Stop this subscription when the service ends."""
        self._subscriptions.push_async_callback(subscription.stop)
        return subscription


async def _or_log(coro: Coroutine[Any, Any, Any], name: str) -> None:
    try:
        await coro
    except (BusError, PeerError) as error:
        log.warning("message.lost", task=name, error=str(error))


async def before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of the work; None if `stop` was set first, which ends the work."""
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        working.cancel()
        stopped.cancel()
