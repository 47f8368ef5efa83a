"""Tests of KV that moves between two torch workers: answers go on as if nothing had moved, whatever
the way and the peer do.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from services.worker.engines.torch.engine import TorchEngine
from shared.vocabulary import Slot
from tests.services.worker.kv.far import Far, far
from tests.services.worker.kv.sides import BLOCK_TOKENS, WITHIN_S, Side, side, torch_engine, until
from tests.services.worker.tiny_models import near, tiny_model

PROMPT = [(11 * n + n // 7) % 256 for n in range(202)]
FULL = 200  # of its positions, the blocks that move: the last token is always computed
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 2 * 32  # float32, keys and values of two layers of 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "Llama")


@pytest.fixture(scope="module")
def made(model: Path) -> tuple[TorchEngine, TorchEngine]:
    return torch_engine(model), torch_engine(model)


@pytest.fixture
def engines(made: tuple[TorchEngine, TorchEngine]) -> tuple[TorchEngine, TorchEngine]:
    """Two engines that know nothing yet."""
    for engine in made:
        engine.restart()
    return made


Engines = tuple[TorchEngine, TorchEngine]


@asynccontextmanager
async def two(engines: Engines) -> AsyncIterator[tuple[Side, Side, Far]]:
    """The one that has computed PROMPT, the one that has not, and the long way to the first."""
    async with (
        side("a", engines[0]) as a,
        side("b", engines[1]) as b,
        far(a.mover.address) as proxy,
    ):
        await a.prompt(0, PROMPT)
        yield a, b, proxy


async def alone(engine: TorchEngine, prompt: Sequence[int], tokens: int) -> list[int]:
    """The answer of one engine, which forgets it."""
    async with side("alone", engine) as one:
        first = await one.prompt(0, prompt)
        said = [*first.tokens, *await one.go_on(0, tokens)]
    engine.restart()
    return said


def test_a_block_has_the_size_that_these_tests_count_with(engines: Engines) -> None:
    kv = engines[0].facts.kv
    assert kv is not None and (kv.block_bytes, kv.block_tokens) == (BLOCK_BYTES, BLOCK_TOKENS)


@pytest.mark.parametrize("way", ["shelf", "tcp"])
async def test_an_answer_goes_on_elsewhere_with_the_same_tokens_and_a_token_computed(
    engines: Engines, way: str
) -> None:
    said = await alone(engines[0], PROMPT, 11)
    async with two(engines) as (a, b, proxy):
        begun = await a.go_on(0, 6)
        text = [*PROMPT, *said[:7]]
        assert begun == said[1:7]
        address = a.mover.address if way == "shelf" else proxy.address
        there = await b.mover.fetch("k", text, b"", address, WITHIN_S)
        assert there == len(text) - 1  # 52 full blocks, and the token that is always computed
        done = await b.prompt(0, text)
        assert (done.cached, done.computed) == (there, len(text))
        assert [*done.tokens, *await b.go_on(0, 4)] == said[7:]
        assert bool(proxy.passed) == (way == "tcp")
        assert b.mover.move_s > 0


async def test_blocks_come_while_the_prompt_is_computed(engines: Engines) -> None:
    async with side("a", engines[0]) as a, side("b", engines[1]) as b:
        b.mover.ahead("k", PROMPT[:200], b"", a.mover.address)
        await a.load(0, PROMPT[:200])
        for chunk in range(4):
            await a.work(0, 50, chunk == 3)
            wanted = (50 * (chunk + 1)) // BLOCK_TOKENS * BLOCK_TOKENS
            await until(partial(_has, b, wanted))
        text = [*PROMPT[:200], 5]
        assert await b.mover.fetch("k", text, b"", a.mover.address, WITHIN_S) == 200
        assert (await b.prompt(0, text)).cached == 200


async def _has(one: Side, tokens: int) -> bool:
    return await one.has([*PROMPT[:200], 5]) == tokens


async def test_what_is_never_computed_there_is_waited_for_no_longer_than_asked(
    engines: Engines,
) -> None:
    async with two(engines) as (a, b, _):
        longer = [*PROMPT, *range(40)]
        b.mover.ahead("k", longer, b"", a.mover.address)
        await until(lambda: _all_of_it(b))
        assert await b.mover.fetch("k", longer, b"", a.mover.address, WITHIN_S) == FULL


async def _all_of_it(one: Side) -> bool:
    return await one.has(PROMPT) == FULL


async def test_a_damaged_block_is_dropped_and_asked_for_again(engines: Engines) -> None:
    said = await alone(engines[0], PROMPT, 3)
    async with two(engines) as (_, b, proxy):
        proxy.damaged = 40 * BLOCK_BYTES
        assert await b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S) == FULL
        assert proxy.damaged is None
        first, again = proxy.passed
        assert first > FULL // BLOCK_TOKENS * BLOCK_BYTES
        assert BLOCK_BYTES < again < 2 * BLOCK_BYTES, "only that one came again"
        assert [*(await b.prompt(0, PROMPT)).tokens, *await b.go_on(0, 3)] == said


async def test_a_transfer_that_breaks_off_goes_on_where_it_was(engines: Engines) -> None:
    async with two(engines) as (_, b, proxy):
        proxy.cut = 30 * BLOCK_BYTES
        assert await b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S) == FULL
        first, again = proxy.passed
        assert first == proxy.cut
        assert again < 23 * BLOCK_BYTES, "29 of 50 blocks had come"


async def test_what_came_in_time_counts_and_the_rest_comes_another_time(engines: Engines) -> None:
    async with two(engines) as (_, b, proxy):
        proxy.stop = 30 * BLOCK_BYTES
        fetching = asyncio.create_task(b.mover.fetch("k", PROMPT, b"", proxy.address, 1.0))
        came = await fetching
        # on a machine that stood still for a second, less
        assert came <= 29 * BLOCK_TOKENS
        assert came == 29 * BLOCK_TOKENS or not proxy.stopped.is_set()
        assert (await b.prompt(0, PROMPT)).cached == came
        proxy.stop = None
        b.engine.release(Slot(0))
        assert await b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S) == FULL


async def test_a_slow_link_is_known_to_be_slow(engines: Engines) -> None:
    async with two(engines) as (_, b, proxy):
        before_s = b.mover.move_s
        proxy.rate = 200_000.0
        assert await b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S) == FULL
        # so little changes the average only in part
        slow_s = BLOCK_BYTES / BLOCK_TOKENS / proxy.rate
        assert before_s < slow_s / 20 < b.mover.move_s


async def test_a_fetch_that_is_cancelled_ends_and_leaves_nothing_behind(engines: Engines) -> None:
    async with two(engines) as (a, b, proxy):
        proxy.stop = 30 * BLOCK_BYTES
        fetching = asyncio.create_task(b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S))
        b.mover.ahead("l", [*PROMPT, *range(40)], b"", proxy.address)
        await proxy.stopped.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        b.mover.forget("l")
        await until(lambda: _at_rest(a, b))
        proxy.stop = None
        assert await b.mover.fetch("k", PROMPT, b"", proxy.address, WITHIN_S) == FULL


async def _at_rest(*sides: Side) -> bool:
    return all(one.mover.at_rest for one in sides)


async def test_a_peer_of_another_model_is_refused(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tiny_model(tmp_path_factory.mktemp("other"), "Llama", rope_theta=5000.0)
    async with two(engines) as (a, _, _), side("o", torch_engine(other)) as stranger:
        assert await stranger.mover.fetch("k", PROMPT, b"", a.mover.address, WITHIN_S) == 0


def test_engines_have_one_layout_if_they_can_use_each_others_kv(
    engines: Engines, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    trained = near(tmp_path_factory.mktemp("trained"), model, 1e-3)
    others = [
        torch_engine(model, dtype="bfloat16"),
        torch_engine(model, block_tokens=8),
        torch_engine(trained),
    ]
    layouts = [one.facts.kv.layout for one in (*engines, *others) if one.facts.kv is not None]
    assert layouts[0] == layouts[1]
    assert len(set(layouts)) == 4


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere.invalid:80", "what", "h:what"])
async def test_a_peer_that_is_not_there_costs_nothing(engines: Engines, address: str) -> None:
    async with side("b", engines[1]) as b:
        assert await b.mover.fetch("k", PROMPT, b"", address, WITHIN_S) == 0


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        b"\x05\x00\x00\x00ab",
    ],
)
async def test_whoever_talks_otherwise_is_cut_off_and_others_are_served(
    engines: Engines, said: bytes
) -> None:
    async with two(engines) as (a, b, _):
        host, _, port = a.mover.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(said)
        if len(said) == 6:  # half a message, and its end
            writer.write_eof()
        with suppress(ConnectionResetError):
            async with asyncio.timeout(WITHIN_S):
                assert await reader.read() == b""
        writer.close()
        assert await b.mover.fetch("k", PROMPT, b"", a.mover.address, WITHIN_S) == FULL


async def test_many_at_once_share_the_rows_and_all_get_theirs(engines: Engines) -> None:
    async with two(engines) as (a, b, proxy):
        prompts = [[n, *PROMPT[:40]] for n in range(6)]
        for n, each in enumerate(prompts):
            await a.prompt(n + 1, each)
            if n >= 2:
                a.engine.release(Slot(n + 1))
        addresses = (a.mover.address, proxy.address)
        got = await asyncio.gather(
            *(
                b.mover.fetch(f"k{n}", each, b"", addresses[n % 2], WITHIN_S)
                for n, each in enumerate(prompts)
            )
        )
        assert got == [40] * 6


async def test_no_more_comes_than_there_is_room_for_and_nobody_loses_a_block(
    engines: Engines, model: Path
) -> None:
    own = [7] * 42
    said = await alone(engines[1], own, 20)
    async with two(engines) as (a, _, _), side("c", torch_engine(model, kv_blocks=30)) as c:
        first = await c.prompt(0, own)
        assert c.engine.snapshot().free_blocks == 30 - 11
        assert await c.mover.fetch("k", PROMPT, b"", a.mover.address, WITHIN_S) == 19 * BLOCK_TOKENS
        assert c.engine.snapshot().free_blocks == 30 - 11
        assert [*first.tokens, *await c.go_on(0, 20)] == said
