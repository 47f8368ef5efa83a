"""Tests of relegation's timers: a request expires at the same instant live and simulated."""

import asyncio
from random import Random

import msgspec
import pytest

from services.relegation.config import RelegationConfig
from services.relegation.service import Relegation
from shared.core.relegation.relegation import Expire, Queued, RelegationCore
from shared.core.tick import Tick
from shared.schemas import Record
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import FinishReason, ServiceClass, Slo
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.process import EPOCH_UNIX_S
from tests.simulated.virtual_loop import run_virtual, virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing


def relegated(name: str, expires_unix_s: float) -> Record:
    return made.record(
        f"default.{name}",
        owner="admission",
        state="relegated",
        attempt=1,
        service_class=ServiceClass.BEST_EFFORT,
        slo=Slo(ttft_s=0.3),
        arrived_unix_s=EPOCH_UNIX_S,
        expires_unix_s=expires_unix_s,
        stream_subject="slo.v1.stream.x",
    )


def stored(net: SimNet, name: str) -> Record:
    entry = net.requests.get(f"s.default.{name}", now_s=net.loop.time())
    assert entry is not None
    return msgspec.msgpack.decode(entry.value, type=Record)


def simulated_unix_s(record: Record) -> float:
    """The instant at which the simulator's driver has the core expire the request."""
    core = RelegationCore()
    core.handle(Queued(record), now_unix_s=EPOCH_UNIX_S)
    wake_unix_s = core.wake_at_unix_s()
    assert wake_unix_s is not None
    assert core.handle(Tick(), now_unix_s=wake_unix_s) == [Expire(record.key)]
    return wake_unix_s


def test_a_request_expires_at_its_instant_live_as_simulated():
    offsets_s = (3.11, 3.57, 4.02, 7.9)

    async def main() -> list[Record]:
        net = SimNet(Random(1), Faults(latency_s=(0.0, 0.0)))
        for n, offset_s in enumerate(offsets_s):
            record = relegated(f"q{n}", EPOCH_UNIX_S + offset_s)
            net.requests.create(
                f"s.{record.key}", msgspec.msgpack.encode(record), None, now_s=net.loop.time()
            )
        service = Relegation(RelegationConfig(), net.connect("a"), net.clock, Tracing(), Random(2))
        stop = asyncio.Event()
        running = asyncio.create_task(service.run(stop))
        await asyncio.sleep(10.0)
        stop.set()
        await running
        return [stored(net, f"q{n}") for n in range(len(offsets_s))]

    for record in run_virtual(main()):
        assert record.verdict is not None
        assert record.verdict.finish_reason is FinishReason.EXPIRED
        assert record.verdict.ended_unix_s == pytest.approx(simulated_unix_s(record), abs=1e-6)


@virtual()
async def test_without_the_lease_nothing_expires_and_with_it_everything_that_is_due_does():
    net = SimNet(Random(1), Faults())
    record = relegated("q0", EPOCH_UNIX_S + 2.0)
    net.requests.create(
        f"s.{record.key}", msgspec.msgpack.encode(record), None, now_s=net.loop.time()
    )
    held = net.leases.create("relegation", b"another", 3.0, now_s=net.loop.time())
    service = Relegation(RelegationConfig(), net.connect("a"), net.clock, Tracing(), Random(2))
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    for _ in range(5):
        await asyncio.sleep(1.0)
        held = net.leases.update("relegation", b"another", held, 3.0, now_s=net.loop.time())
    assert stored(net, "q0").verdict is None
    await asyncio.sleep(6.0)
    stop.set()
    await running
    verdict = stored(net, "q0").verdict
    assert verdict is not None and verdict.finish_reason is FinishReason.EXPIRED
