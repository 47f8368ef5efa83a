"""Presence in virtual time: a dead process is gone within half a second, a paused one is not, and
its lease goes to who asks for it.
"""

import asyncio
from random import Random

from shared.store.leases import Lease
from shared.store.presence import CONFIRM_S, RETURN_S, Absences, be_present
from tests.simulated.bus import SimBus, SimNet
from tests.simulated.process import SimProcess
from tests.simulated.virtual_loop import run_virtual

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


def test_who_answers_is_not_gone_and_who_died_soon_is() -> None:
    async def main() -> tuple[float, float]:
        net, _, absences = a_fleet()
        process = await a_process(net, "p")
        alive_s = await seconds_until_gone(absences, "p", LONG_S)
        process.kill()
        return alive_s, await seconds_until_gone(absences, "p", LONG_S)

    alive_s, dead_s = run_virtual(main())
    assert alive_s == LONG_S and dead_s <= SOON_S


def test_who_is_paused_is_not_gone() -> None:
    async def main() -> float:
        net, _, absences = a_fleet()
        process = await a_process(net, "p")
        process.pause()
        return await seconds_until_gone(absences, "p", LONG_S)

    assert run_virtual(main()) == LONG_S


def test_who_is_back_before_it_is_missed_twice_is_not_gone() -> None:
    async def main() -> float:
        net, _, absences = a_fleet()
        process = await a_process(net, "p")
        process.kill()
        assert not await absences.gone("p")
        await a_process(net, "p")
        return await seconds_until_gone(absences, "p", LONG_S)

    assert run_virtual(main()) == LONG_S


def test_after_our_own_connection_was_lost_nobody_is_judged_before_they_can_be_back() -> None:
    async def main() -> float:
        net, bus, absences = a_fleet()
        (await a_process(net, "p")).kill()
        bus.counters.reconnects += 1
        return await seconds_until_gone(absences, "p", LONG_S)

    assert RETURN_S <= run_virtual(main()) <= RETURN_S + SOON_S


async def seconds_until_taken(lease: Lease) -> float:
    begun = asyncio.get_running_loop().time()
    async with asyncio.timeout(LONG_S):
        while not await lease.acquire():
            await asyncio.sleep(0.1)
    return asyncio.get_running_loop().time() - begun


def test_the_lease_of_a_dead_holder_goes_to_the_next_and_that_of_a_live_one_does_not() -> None:
    async def main() -> tuple[bool, float, int, int]:
        net, bus, absences = a_fleet()
        process = await a_process(net, "p", lease="l")
        mine = Lease(bus.leases, "l", "asker", absences)
        while_held, held = await mine.acquire(), await bus.leases.get("l")
        process.kill()
        assert held is not None
        return while_held, await seconds_until_taken(mine), held.revision, mine.epoch

    while_held, taken_s, before, epoch = run_virtual(main())
    assert not while_held and taken_s <= SOON_S + CONFIRM_S and epoch > before


def test_a_lease_that_another_has_taken_is_not_given_back() -> None:
    async def main() -> bool:
        net, bus, absences = a_fleet()
        old_bus = net.connect("old")
        old = Lease(old_bus.leases, "l", "old", Absences(old_bus, net.clock))
        assert await old.acquire()  # it never says that it is present
        await asyncio.sleep(0.1)
        mine = Lease(bus.leases, "l", "asker", absences)
        await seconds_until_taken(mine)
        await old.release()
        return await mine.renew()

    assert run_virtual(main())
