"""Tests of admission's sweep, which recovers requests: one that is stuck does not stop others."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from shared.client.client import Client, Handle, Patience
from shared.errors import BusTimeout, StoreFull
from shared.schemas import Record
from shared.subjects import ack_log
from tests.fleet.live import request_for
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.simulated.virtual_loop import run_virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

REPLICAS = ("r0", "r1", "r2")


class Fleet:
    """A simulated fleet of three replicas that hold three long requests each."""

    def __init__(self, world: World, client: Client) -> None:
        self.world, self._client = world, client
        self.handles: dict[str, Handle] = {}

    async def begin(self) -> None:
        for kind in ("admission-0", "planner-0", "relegation-0"):
            self.world.start(kind)
        for replica in REPLICAS:
            self.world.start(f"worker-{replica}")
        await asyncio.sleep(2.0)
        for n in range(3 * len(REPLICAS)):
            request = request_for(1000, f"q{n}", prompt=None, token_ids=[40, 41])
            self.handles[f"q{n}"] = await self._client.submit(request, "chat")
        await asyncio.sleep(1.0)

    def at(self, replica: str) -> list[Handle]:
        """The requests that the records place there."""
        net = self.world.net
        records = [
            msgspec.msgpack.decode(entry.value, type=Record)
            for _, entry in net.requests.scan("s.", now_s=net.loop.time())
        ]
        names = [r.key.partition(".")[2] for r in records if r.replica == replica]
        assert names, f"no request is at {replica}"
        return [self.handles[name] for name in names]

    def refuse_writes_to(self, replica: str) -> None:
        """The log of the replica is full from now on."""
        append = self.world.net.acks.append

        def full(subject: str, payload: bytes, expected_last: int) -> int:
            if subject == ack_log(replica):
                raise StoreFull("the log is full")
            return append(subject, payload, expected_last)

        self.world.net.acks.append = full  # type: ignore[method-assign]

    def refuse_reads_of(self, replica: str) -> None:
        """Nobody can read the log of the replica from now on."""
        read = self.world.net.acks.read

        def unreadable(subject: str, after: int) -> object:
            if subject == ack_log(replica):
                raise BusTimeout("the stream has no leader")
            return read(subject, after)

        self.world.net.acks.read = unreadable  # type: ignore[assignment,method-assign]


def play(main: Callable[[Fleet], Awaitable[None]]) -> None:
    async def run() -> None:
        world = World(Scene(policy="fcfs", faults=CALM), seed=1)
        patience = Patience(give_up_s=600.0, submit_s=60.0)
        bus = world.net.connect("clients")
        async with Client(bus, world.net.clock, patience=patience) as client:
            fleet = Fleet(world, client)
            await fleet.begin()
            await main(fleet)

    run_virtual(run())


async def all_end(handles: list[Handle]) -> None:
    async with asyncio.timeout(60.0):
        for handle in handles:
            assert (await handle.wait()).finish_reason == "length"


def test_a_worker_that_cannot_end_its_requests_holds_up_no_recovery() -> None:
    """Its log is full and clients of it cancel: each sweep withdraws their requests in vain."""

    async def main(fleet: Fleet) -> None:
        cancelled, stranded = fleet.at("r0"), fleet.at("r1")
        fleet.refuse_writes_to("r0")
        for handle in cancelled:
            await handle.cancel()
        await asyncio.sleep(10.0)
        fleet.world.processes["worker-r1"].pause()  # its machine is gone
        await all_end(stranded)

    play(main)


def test_a_log_that_nobody_can_read_holds_up_no_other_recovery() -> None:
    async def main(fleet: Fleet) -> None:
        stranded = fleet.at("r1")
        fleet.refuse_reads_of("r0")
        fleet.world.processes["worker-r0"].pause()
        await asyncio.sleep(10.0)
        fleet.world.processes["worker-r1"].pause()
        await all_end(stranded)

    play(main)


def test_a_deleted_record_whose_log_nobody_can_read_holds_up_no_recovery() -> None:
    async def main(fleet: Fleet) -> None:
        net, stranded = fleet.world.net, fleet.at("r1")
        fleet.refuse_reads_of("r0")
        net.requests.delete(f"s.{fleet.at('r0')[0].key}", now_s=net.loop.time())
        await asyncio.sleep(10.0)
        fleet.world.processes["worker-r1"].pause()
        await all_end(stranded)

    play(main)
