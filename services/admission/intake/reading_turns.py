"""Lets long texts wait their turn for the threads that tokenise them, fairly among tenants."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush

from shared.errors import PeerError

# A text this long takes 0.25 s, at 1 us a byte, the longest 8 s; its memory is 200 times its size
HUGE_BYTES = 256 * 1024
# the longest wait for a turn: whoever submits gives up after 15 s, and the longest text takes 8
WAIT_S = 7.0

Line = list[tuple[float, int, "asyncio.Future[None]"]]  # a heap by the virtual start


class Turns:
    """`at_once` texts are read at once, at most one of them huge. Where several tenants wait, each
    has bytes read in proportion to its weight.

    Start-time fair queueing (Goyal et al., SIGCOMM 1996): in virtual time a text starts where its
    tenant's last one ends, but not before the text that began last. It takes its size divided by
    the weight. The text that starts first is next. Waiting texts are bounded where they are let in.
    """

    def __init__(self, at_once: int) -> None:
        self._free, self._huge_free = at_once, True
        self._now = 0.0  # in virtual time: the start of what began last
        self._ends: dict[str, float] = {}  # of each tenant's last text, where later than now
        self._short: Line = []
        self._huge: Line = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def turn(self, tenant: str, weight: float, size_bytes: int) -> AsyncIterator[None]:
        """The turn of a text, until the end of the block. Raises PeerError after WAIT_S."""
        huge = size_bytes >= HUGE_BYTES
        virtual = size_bytes / weight
        starts = max(self._now, self._ends.get(tenant, 0.0))
        self._ends[tenant] = starts + virtual
        begun = asyncio.get_running_loop().create_future()
        heappush(self._huge if huge else self._short, (starts, next(self._numbers), begun))
        self._begin()
        try:
            async with asyncio.timeout(WAIT_S):
                await begun
        except (TimeoutError, asyncio.CancelledError) as error:
            if not begun.cancelled():  # its turn came meanwhile
                self._end(huge)
            elif tenant in self._ends:
                self._ends[tenant] -= virtual
            if isinstance(error, TimeoutError):
                raise PeerError(
                    "other long prompts are being read: ask again", code="server_is_overloaded"
                ) from None
            raise
        try:
            yield
        finally:
            self._end(huge)

    def _begin(self) -> None:
        while self._free and (line := self._next()):
            starts, _, begun = heappop(line)
            if begun.done():  # its caller has given up
                continue
            self._free -= 1
            self._huge_free = self._huge_free and line is not self._huge
            self._now = max(self._now, starts)
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
            begun.set_result(None)

    def _next(self) -> Line:
        """The line whose first text is next; an empty line where no text may begin."""
        if not (self._huge and self._huge_free):
            return self._short
        return min(self._huge, self._short or self._huge)

    def _end(self, huge: bool) -> None:
        self._free += 1
        self._huge_free = self._huge_free or huge
        self._begin()
