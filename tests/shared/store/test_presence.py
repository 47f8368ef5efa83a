"""Tests of how services notice a dead process: it is gone within half a second, a paused one is
not, and its lease goes to the next one that asks.
"""

import asyncio
from random import Random

from shared.store.leases import Lease
from shared.store.presence import CONFIRM_S, RETURN_S, Absences, be_present
from tests.simulated.bus import SimBus, SimNet
from tests.simulated.process import SimProcess
from tests.simulated.virtual_loop import virtual

SOON_S = 0.6  # from a death until it is known
LONG_S = 20.0


def a_fleet() -> tuple[SimNet, SimBus, Absences]:
    net = SimNet(Random(1))
    bus = net.connect("asker")
    return net, bus, Absences(bus, net.clock)


async def a_process(net: SimNet, name: str, lease: str = "") -> SimProcess:
    """A process that is present, and holds the lease for as long as it has not run out."""
    ready, process = asyncio.Event(), SimProcess(name)

    async def main() -> None:
        bus = net.connect(name, process)
        await be_present(bus, name)
        if lease:
            assert await Lease(bus.leases, lease, name, Absences(bus, process.clock)).acquire()
        ready.set()
        await asyncio.Event().wait()

    process.start(main())
    await ready.wait()
    return process


async def seconds_until_gone(absences: Absences, name: str, limit_s: float) -> float:
    """Ask as often as a service does. The limit if the name is still there by then."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    while loop.time() - begun < limit_s:
        if await absences.gone(name):
            return loop.time() - begun
        await asyncio.sleep(0.1)
    return limit_s


@virtual()
async def test_who_answers_is_not_gone_and_who_died_soon_is() -> None:
    net, _, absences = a_fleet()
    process = await a_process(net, "p")
    assert await seconds_until_gone(absences, "p", LONG_S) == LONG_S
    process.kill()
    assert await seconds_until_gone(absences, "p", LONG_S) <= SOON_S


@virtual()
async def test_who_is_paused_is_not_gone() -> None:
    net, _, absences = a_fleet()
    process = await a_process(net, "p")
    process.pause()
    assert await seconds_until_gone(absences, "p", LONG_S) == LONG_S


@virtual()
async def test_after_our_own_connection_was_lost_nobody_is_judged_before_they_can_be_back() -> None:
    net, bus, absences = a_fleet()
    (await a_process(net, "p")).kill()
    bus.counters.reconnects += 1
    assert RETURN_S <= await seconds_until_gone(absences, "p", LONG_S) <= RETURN_S + SOON_S


async def seconds_until_taken(lease: Lease) -> float:
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(LONG_S):
        while not await lease.acquire():
            await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time() - begun


@virtual()
async def test_the_lease_of_a_dead_holder_goes_to_the_next_and_that_of_a_live_one_does_not() -> (
    None
):
    net, bus, absences = a_fleet()
    process = await a_process(net, "p", lease="l")
    mine = Lease(bus.leases, "l", "asker", absences)
    assert not await mine.acquire()
    held = await bus.leases.get("l")
    process.kill()
    assert await seconds_until_taken(mine) <= SOON_S + CONFIRM_S
    assert held is not None and mine.epoch > held.revision


@virtual()
async def test_a_lease_that_another_has_taken_is_not_given_back() -> None:
    net, bus, absences = a_fleet()
    old_bus = net.connect("old")
    old = Lease(old_bus.leases, "l", "old", Absences(old_bus, net.clock))
    assert await old.acquire()  # it never says that it is present
    await asyncio.sleep(0.1)
    mine = Lease(bus.leases, "l", "asker", absences)
    await seconds_until_taken(mine)
    await old.release()
    assert await mine.renew()
