"""Reads several handles as one, in the order of their events."""

import asyncio
from collections.abc import Sequence

from shared.client.client import Handle
from shared.schemas import StreamEvent


class Merge:
    """Reads handles in turns, so that none waits behind a busy one. Nothing is queued here."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._turn = 0
        self._wake = asyncio.Event()
        for handle in handles:
            handle.wake = self._wake

    @property
    def ready(self) -> bool:
        """True if some event has come already."""
        return any(handle.unread for handle in self._handles)

    async def next(self) -> tuple[int, StreamEvent]:
        """The number of a handle, and its next event; may be cancelled and repeated. Raises any
        handle's failure. Call it only while some handle has not given its End.
        """
        count = len(self._handles)
        while True:
            for step in range(count):
                number = (self._turn + step) % count
                if (event := self._handles[number].take()) is not None:
                    self._turn = (number + 1) % count
                    return number, event
            self._wake.clear()
            await self._wake.wait()
