"""Tests of the simulated broker and bus: the same run for the same seed, faults that do what they
say, and processes that die and return.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from msgspec import Struct

from shared.bus.api import Bus, Call
from shared.errors import BusError, BusTimeout, NoResponders, WrongSequence
from tests.simulated.broker import RECONNECT_SPREAD_S, Faults
from tests.simulated.bus import STORE_S, SimNet
from tests.simulated.process import SimProcess, virtual_loop
from tests.simulated.virtual_loop import run_virtual, virtual


class Note(Struct, frozen=True, kw_only=True):
    number: int


ALL_FAULTS = Faults(
    spike=0.05,
    loss=0.05,
    duplicate=0.05,
    reorder=0.1,
    store_lost=0.05,
    store_silent=0.05,
    store_late=0.05,
    publish_yields=0.2,
)


def on_net(
    main: Callable[[SimNet], Coroutine[Any, Any, Any]],
    faults: Faults | None = None,
    seed: int = 1,
    trace_lines: int = 0,
) -> Any:
    async def begin() -> Any:
        return await main(SimNet(random.Random(seed), faults, trace_lines=trace_lines))

    return run_virtual(begin())


def echo(bus: Bus) -> Callable[[Note, Call], None]:
    def on_note(msg: Note, call: Call) -> None:
        asyncio.get_running_loop().create_task(call.reply(msg))

    return on_note


async def talk(net: SimNet) -> list[tuple[float, str, str]]:
    """The trace of a busy run with every fault there is."""

    async def serve(bus: Bus) -> None:
        await bus.subscribe("t.echo.*", Note, echo(bus), queue="q")
        await asyncio.Event().wait()

    async def ask(bus: Bus, name: str) -> None:
        for number in range(40):
            with contextlib.suppress(BusError):
                await bus.request(f"t.echo.{name}", Note(number=number), Note, timeout_s=0.2)
            with contextlib.suppress(BusError):
                entry = await bus.requests.get("s.shared")
                await bus.requests.update("s.shared", name.encode(), entry.revision if entry else 0)
            with contextlib.suppress(BusError):
                last = await bus.acks.last("a.shared")
                await bus.acks.append("a.shared", name.encode(), last[0] if last else 0)

    servers = [SimProcess(name) for name in ("x", "y", "z")]
    for server in servers:
        server.start(serve(net.connect(server.name, server)))
    await asyncio.sleep(0.01)
    asking = [asyncio.create_task(ask(net.connect(name), name)) for name in "abc"]
    await asyncio.sleep(2)
    servers[0].kill()
    servers[1].pause()
    await asyncio.sleep(2)
    servers[1].resume()
    net.restart_broker(1.0)
    await asyncio.gather(*asking)
    assert net.trace is not None
    return list(net.trace)


def test_one_seed_tells_one_story_and_another_seed_another():
    first = on_net(talk, ALL_FAULTS, 7, 100_000)
    assert len(first) > 500
    assert on_net(talk, ALL_FAULTS, 7, 100_000) == first
    assert on_net(talk, ALL_FAULTS, 8, 100_000) != first


@virtual()
async def test_a_killed_process_sends_nothing_more_and_a_call_to_it_finds_nobody():
    net = SimNet(random.Random(1))
    heard: list[int] = []

    async def shout(bus: Bus) -> None:
        await bus.subscribe("t.echo", Note, echo(bus))
        number = 0
        try:
            while True:
                await bus.publish("t.shout", Note(number=number))
                number += 1
                await asyncio.sleep(0.1)
        finally:
            await bus.publish("t.shout", Note(number=-1))
            await bus.requests.create("s.last-words", b"")

    listener = net.connect("listener")
    await listener.subscribe("t.shout", Note, lambda msg, call: heard.append(msg.number))
    process = SimProcess("shouter")
    process.start(shout(net.connect("shouter", process)))
    await asyncio.sleep(1)
    assert await listener.request("t.echo", Note(number=5), Note, timeout_s=1) == Note(number=5)
    process.kill()
    await asyncio.sleep(0.01)
    heard_by_then = list(heard)
    with pytest.raises(NoResponders):
        await listener.request("t.echo", Note(number=5), Note, timeout_s=1)
    await asyncio.sleep(100)
    assert heard == heard_by_then == list(range(len(heard)))
    assert await listener.requests.get("s.last-words") is None


@virtual()
async def test_a_paused_process_is_still_called_and_answers_when_it_is_back():
    net = SimNet(random.Random(1))
    heard: list[tuple[float, int]] = []

    async def serve(bus: Bus) -> None:
        await bus.subscribe(
            "t.echo", Note, lambda msg, call: heard.append((virtual_loop().time(), msg.number))
        )
        await asyncio.Event().wait()

    process, client = SimProcess("server"), net.connect("client")
    process.start(serve(net.connect("server", process)))
    await asyncio.sleep(1)
    process.pause()
    for number in range(3):
        with pytest.raises(BusTimeout):
            await client.request("t.echo", Note(number=number), Note, timeout_s=0.5)
    assert heard == []
    process.resume()
    await asyncio.sleep(0)
    assert heard == [(2.5, 0), (2.5, 1), (2.5, 2)]


def test_a_write_that_timed_out_may_have_happened_or_not_or_happen_later():
    async def write(net: SimNet, **faults: float) -> tuple[bytes, bytes]:
        bus = net.connect("a")
        revision = await bus.requests.create("s.a", b"before")
        net.faults = Faults(**faults)
        with pytest.raises(BusTimeout):
            await bus.requests.update("s.a", b"after", revision)
        net.faults = Faults()
        at_once = await bus.requests.get("s.a")
        await asyncio.sleep(5)
        in_the_end = await bus.requests.get("s.a")
        return at_once.value, in_the_end.value

    assert on_net(lambda net: write(net, store_lost=1.0)) == (b"before", b"before")
    assert on_net(lambda net: write(net, store_silent=1.0)) == (b"after", b"after")
    assert on_net(lambda net: write(net, store_late=1.0)) == (b"before", b"after")


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (Faults(), lambda seen: seen == list(range(200))),
        (Faults(spike=0.1), lambda seen: seen == list(range(200))),
        (Faults(loss=0.1), lambda seen: len(seen) < 200 and seen == sorted(seen)),
        (Faults(duplicate=0.1), lambda seen: len(seen) > 200 and set(seen) == set(range(200))),
        (
            Faults(reorder=0.1),
            lambda seen: seen != sorted(seen) and sorted(seen) == list(range(200)),
        ),
    ],
    ids=["healthy", "spike", "loss", "duplicate", "reorder"],
)
def test_each_fault_does_what_it_says_and_nothing_else(
    faults: Faults, expected: Callable[[list[int]], bool]
):
    async def main(net: SimNet) -> list[int]:
        seen: list[int] = []
        await net.connect("b").subscribe("t.>", Note, lambda msg, call: seen.append(msg.number))
        net.faults = faults
        bus = net.connect("a")
        for number in range(200):
            await bus.publish("t.a.b", Note(number=number))
            await asyncio.sleep(0.0002)
        await asyncio.sleep(1)
        return seen

    assert expected(on_net(main))


@virtual()
async def test_a_message_sent_before_a_write_is_heard_before_what_follows_from_the_write():
    """NATS has one order per server: a third party that acts on the write cannot overtake the
    message.
    """
    net = SimNet(random.Random(1), Faults(spike=0.2))
    a, b, c = net.connect("a"), net.connect("b"), net.connect("c")
    seen: list[int] = []
    await c.subscribe("t", Note, lambda msg, call: seen.append(msg.number))
    for n in range(50):
        await a.publish("t", Note(number=2 * n))
        await a.requests.create(f"s.{n}", b"")
        assert await b.requests.get(f"s.{n}") is not None
        await b.publish("t", Note(number=2 * n + 1))
    await asyncio.sleep(1)
    assert all(seen.index(2 * n) < seen.index(2 * n + 1) for n in range(50))


def test_a_broker_restart_loses_messages_keeps_what_is_durable_and_lets_leases_run_out():
    async def main(net: SimNet) -> None:
        a, b = net.connect("a"), net.connect("b")
        seen: list[int] = []
        await b.subscribe("t", Note, lambda msg, call: seen.append(msg.number))
        await a.requests.create("s.a", b"kept")
        lease = await a.leases.create("r", b"a")
        seq = await a.acks.append("acks.a", b"kept", 0)
        await a.publish("t", Note(number=1))
        net.restart_broker(4.0)
        with pytest.raises(BusTimeout):
            await a.requests.get("s.a")
        with pytest.raises(BusTimeout):
            await a.request("t", Note(number=2), Note, timeout_s=0.5)
        await asyncio.sleep(4.0 - STORE_S - 0.5 + RECONNECT_SPREAD_S + 0.1)
        assert (await a.requests.get("s.a")).value == b"kept"
        assert await a.acks.last("acks.a") == (seq, b"kept")
        with pytest.raises(WrongSequence):
            await a.leases.update("r", b"a", lease)
        assert await a.leases.create("r", b"a") > lease
        await a.publish("t", Note(number=3))
        await asyncio.sleep(1)
        assert 1 not in seen
        assert 3 in seen

    for seed in range(20):
        on_net(main, seed=seed)


@virtual()
async def test_a_connection_that_is_cut_off_hears_nothing_until_it_is_back():
    net = SimNet(random.Random(1))
    a, b = net.connect("a"), net.connect("b")
    await b.subscribe("t", Note, echo(b))
    net.cut("b", 3.0)
    with pytest.raises(NoResponders):
        await a.request("t", Note(number=1), Note, timeout_s=1)
    await asyncio.sleep(3.0 + RECONNECT_SPREAD_S)
    assert await a.request("t", Note(number=1), Note, timeout_s=1) == Note(number=1)


@virtual()
async def test_bytes_that_are_no_message_are_counted_and_dropped():
    net = SimNet(random.Random(1))
    bus, seen = net.connect("a"), list[Note]()
    await bus.subscribe("t", Note, lambda msg, call: seen.append(msg))
    for payload in (b"", b"\xc1", b'{"number": 1}', random.Random(3).randbytes(100_000)):
        net.inject("t", payload)
    net.inject("t", b'{"number": 1}', {"Content-Type": "application/json"})
    await asyncio.sleep(1)
    assert seen == [Note(number=1)]
    assert bus.counters.bad_payloads == 4


def test_a_handler_that_fails_ends_the_run():
    async def main(net: SimNet) -> None:
        bus = net.connect("a")
        await bus.subscribe("t", Note, lambda msg, call: 1 / (msg.number - 1))
        await bus.publish("t", Note(number=1))
        await asyncio.sleep(1)

    with pytest.raises(ZeroDivisionError):
        on_net(main)


tokens = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=5)
