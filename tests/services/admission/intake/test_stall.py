"""Tests of the watch for pauses of admission's process: it does not spin on a closed connection."""

import asyncio
from random import Random

import pytest

from services.admission.intake.stall import STALLED_S, Stall
from shared.errors import BusError
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import virtual


@virtual()
async def test_the_watch_lets_others_run_where_the_connection_is_closed_for_good() -> None:
    net = SimNet(Random(1))
    bus, flushed = net.connect("admission"), 0

    async def closed(timeout_s: float) -> None:
        nonlocal flushed
        flushed += 1
        assert flushed < 10, "it spins"
        raise BusError("the connection is closed")

    bus.flush = closed  # type: ignore[method-assign]
    stall = Stall(bus, net.clock)
    await asyncio.sleep(2 * STALLED_S)  # a pause
    watching = asyncio.create_task(stall.watch())
    await asyncio.sleep(1.0)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert flushed >= 2
