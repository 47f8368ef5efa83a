"""Tests of the gateway's Deadline: each wait has the whole limit; a cancellation is no timeout."""

import asyncio

import pytest

from services.gateway.http.deadline import Deadline
from tests.simulated.virtual_loop import virtual

LIMIT_S = 4.0


@virtual()
async def test_a_wait_longer_than_the_limit_ends_then_and_the_next_one_has_a_limit_of_its_own() -> (
    None
):
    loop, deadline = asyncio.get_running_loop(), Deadline(LIMIT_S)
    for _ in range(3):
        began_at_s = loop.time()
        with pytest.raises(TimeoutError), deadline:
            await asyncio.sleep(2 * LIMIT_S)
        assert loop.time() - began_at_s == LIMIT_S
        with deadline:
            await asyncio.sleep(0.75 * LIMIT_S)


@virtual()
async def test_a_cancellation_by_others_stays_one() -> None:
    async def waits(deadline_s: float) -> None:
        with Deadline(deadline_s):
            await asyncio.sleep(10 * LIMIT_S)

    for cancelled_s in (LIMIT_S / 2, LIMIT_S):  # before it passes, and at the same instant
        task = asyncio.create_task(waits(LIMIT_S))
        await asyncio.sleep(cancelled_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
