"""Tests of the client on a simulated network: every token comes once, and every wait is bounded."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from shared.client.client import COPIES_FOR_S, Client, Patience
from shared.errors import BusTimeout, NoResponders, PeerError
from shared.schemas import Delta, GenerateRequest, Status
from shared.vocabulary import FinishReason
from tests.shared.client.served_log import LOG, Log, Server, read
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.process import VirtualClock, virtual_loop
from tests.simulated.virtual_loop import VirtualTimeLoop, run_virtual, virtual

# read by conftest.py
LOOP_FACTORIES = {"simulated": VirtualTimeLoop}
ASK = GenerateRequest(request_id="r", prompt="x")


@pytest.fixture
async def net() -> SimNet:
    return SimNet(random.Random(0))


@pytest.fixture
async def server(net: SimNet) -> Server:
    server = Server(net.connect("server"), LOG)
    await server.start()
    return server


@pytest.fixture
def patience() -> Patience | None:
    return None


@pytest.fixture
async def client(net: SimNet, server: Server, patience: Patience | None) -> AsyncIterator[Client]:
    clock = VirtualClock(virtual_loop())
    async with Client(net.connect("client"), clock, patience=patience) as client:
        yield client


@pytest.mark.parametrize("seed", range(25))
def test_on_a_bad_network_every_request_gives_exactly_its_tokens(seed: int) -> None:
    async def main() -> None:
        faults = Faults(loss=0.08, duplicate=0.05, reorder=0.2, reorder_s=0.1)
        net = SimNet(random.Random(seed), faults)
        server = Server(net.connect("server"), LOG)
        await server.start()
        async with Client(net.connect("client"), VirtualClock(virtual_loop())) as client:
            handles = [
                await client.submit(GenerateRequest(request_id=f"r{i}", prompt="x"), "chat")
                for i in range(4)
            ]
            for reader in await asyncio.gather(*(read(handle, LOG) for handle in handles)):
                assert (reader.tokens, reader.text, reader.ends) == (LOG.tokens, LOG.text, 1)
            assert len(server.asked) == 4
        for task in tuple(server.tasks):
            await task

    print(f"seed {seed}")
    run_virtual(main())


async def test_on_a_good_network_nothing_is_asked_of_the_log(
    server: Server, client: Client
) -> None:
    handle = await client.submit(ASK, "chat")
    assert (await read(handle, LOG)).ends == 1
    assert handle.verdict == await handle.wait()
    assert server.attaches == 0


async def test_what_went_wrong_is_raised_after_all_that_came_before_it(client: Client) -> None:
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(0.3)
    handle.close()
    assert [type(handle.take()) for _ in range(3)] == [Status, Delta, Delta]
    with pytest.raises(BusTimeout):
        _ = [event async for event in handle]


async def test_a_reader_that_sleeps_loses_nothing(server: Server, client: Client) -> None:
    long = Log([([i], "x") for i in range(3000)])

    server.log, server.pause_s = long, 0.001
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(200)
    assert (await read(handle, long)).tokens == long.tokens


@pytest.mark.parametrize("after_s", [0.0, 200.0])
async def test_who_waits_for_the_verdict_need_not_read(
    server: Server, client: Client, after_s: float
) -> None:
    server.log, server.pause_s = Log([([i], "x") for i in range(3000)]), 0.001
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(after_s)  # until the queue of unread events is full
    async with asyncio.timeout(600.0):
        assert (await handle.wait()).output_tokens == 3000


async def test_a_cancel_ends_the_request(server: Server, client: Client) -> None:
    server.hang = True
    handle = await client.submit(ASK, "chat")
    await handle.cancel()
    assert (await handle.wait()).finish_reason is FinishReason.CANCELLED


async def test_a_cancel_that_is_lost_is_said_again(
    net: SimNet, server: Server, client: Client
) -> None:
    server.hang = True
    handle = await client.submit(ASK, "chat")
    net.faults = Faults(loss=1.0)
    await handle.cancel()
    await asyncio.sleep(0.5)
    assert not server.cancelled
    net.faults = Faults()
    assert (await handle.wait()).finish_reason is FinishReason.CANCELLED


async def refused_after_an_answer_was_lost(server: Server, client: Client) -> None:
    server.deaf, server.refuse = 1, True
    with pytest.raises(PeerError, match="no room"):
        await client.submit(ASK, "chat")
    server.refuse = False


async def test_what_is_refused_after_an_answer_was_lost_is_withdrawn_wherever_it_may_run(
    server: Server, client: Client
) -> None:
    await refused_after_an_answer_was_lost(server, client)
    await asyncio.sleep(30.0)
    assert server.cancelled == {"default.r": COPIES_FOR_S}


@pytest.mark.parametrize("after_s", [0.01, 0.5, 5.0, 30.0])
async def test_a_refused_request_that_comes_back_under_its_id_runs_to_its_end(
    after_s: float, server: Server, client: Client
) -> None:
    await refused_after_an_answer_was_lost(server, client)
    await asyncio.sleep(after_s)
    before = server.cancelled.total()
    handle = await client.submit(ASK, "chat")
    assert (await read(handle, LOG)).tokens == LOG.tokens
    await asyncio.sleep(30.0)
    assert server.cancelled.total() == before


@virtual()
async def test_with_nobody_serving_a_submit_gives_up_in_time() -> None:
    net, clock = SimNet(random.Random(0)), VirtualClock(virtual_loop())
    async with Client(net.connect("client"), clock, patience=Patience(submit_s=3.0)) as client:
        begin_unix_s = clock.unix_s()
        with pytest.raises(NoResponders):
            await client.submit(ASK, "chat")
        assert clock.unix_s() - begin_unix_s <= 3.0


@pytest.mark.parametrize("patience", [Patience(silence_s=1.0, silence_limit_s=4.0, give_up_s=10.0)])
async def test_a_stream_nobody_answers_for_any_more_raises_in_time(
    net: SimNet, client: Client
) -> None:
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(0.1)
    net.faults = Faults(loss=1.0)
    begin_s = virtual_loop().time()
    with pytest.raises(BusTimeout):
        await read(handle, LOG)
    assert 10.0 <= virtual_loop().time() - begin_s <= 20.0
    net.faults = Faults()


@pytest.mark.parametrize("patience", [Patience(silence_s=1.0, silence_limit_s=4.0)])
async def test_an_admission_without_its_store_is_asked_again_and_not_believed(
    net: SimNet, server: Server, client: Client
) -> None:
    server.storeless = 10
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(0.1)
    net.faults = Faults(loss=1.0)
    await asyncio.sleep(2.0)  # its end is lost
    net.faults = Faults()
    reader = await read(handle, LOG)
    assert reader.tokens == LOG.tokens
    assert server.attaches > server.storeless


async def test_a_lost_end_is_asked_for_after_a_silence(net: SimNet, client: Client) -> None:
    handle = await client.submit(ASK, "chat")
    await asyncio.sleep(0.3)
    net.faults = Faults(loss=1.0)
    await asyncio.sleep(1.0)
    net.faults = Faults()
    begin_s = virtual_loop().time()
    assert (await read(handle, LOG)).tokens == LOG.tokens
    assert virtual_loop().time() - begin_s <= 6.0
