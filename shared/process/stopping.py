"""The stop of a process has one deadline, which counts from the signal: `drain_s`, then LAST_S for
the last writes to the store. Whatever NATS does then, the process ends.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import structlog

from shared.bus.nats import CLOSE_S, NatsBus

log = structlog.get_logger()

LAST_S = 2.5  # after drain_s; a write that NATS answers takes milliseconds, others wait for 2 s
# A process ends within drain_s and this: LAST_S, the end of its tasks, that of its connection, and
# what a busy machine takes. A supervisor may kill it then.
GRACE_S = LAST_S + 2 * CLOSE_S + 0.5


async def ended_in_time(
    work: Coroutine[Any, Any, None], bus: NatsBus, stop: asyncio.Event, drain_s: float
) -> None:
    """Do the work until it ends. From `stop` on it has drain_s + LAST_S; then it is cancelled, and
    waits for the bus last no longer.
    """
    working, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            bus.end_within(drain_s + LAST_S)
            await asyncio.wait((working,), timeout=drain_s + LAST_S)
            if not working.done():
                log.warning("stop.cut", after_s=drain_s + LAST_S)
    finally:
        stopped.cancel()
        working.cancel()
        await asyncio.wait((working,), timeout=CLOSE_S)
    with suppress(asyncio.CancelledError):
        if working.done():
            working.result()
