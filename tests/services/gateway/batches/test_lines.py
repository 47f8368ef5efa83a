"""Tests of reading a batch file line by line while it comes in chunks that are cut anywhere."""

import asyncio
import codecs
import json
from collections.abc import AsyncIterator
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.batches import lines as batch_lines


async def cut(text: bytes, rng: Random) -> AsyncIterator[bytes]:
    """Yield the text in pieces of 1 to 20 bytes."""
    while text:
        size = rng.randint(1, 20)
        yield text[:size]
        text = text[size:]


@given(
    texts=st.lists(st.binary(max_size=30).map(lambda b: b.replace(b"\n", b"")), max_size=12),
    seed=st.integers(0, 2**32),
)
async def test_lines_keep_their_numbers_however_the_file_is_cut(
    texts: list[bytes], seed: int
) -> None:
    found = [one async for one in batch_lines.lines_of(cut(b"\n".join(texts), Random(seed)))]
    assert found == [(n, text) for n, text in enumerate(texts, 1) if text.strip()]


async def test_a_line_without_an_end_is_told_before_it_is_read_to_its_end() -> None:
    asked = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"x" * 1024 * 1024

    _, (error,) = await batch_lines.check(endless(), "/v1/completions")
    assert (error.code, error.line) == ("line_too_long", 1)
    assert asked < 10


async def test_a_byte_order_mark_and_carriage_returns_are_passed_over() -> None:
    line = b'{"custom_id": "%d", "method": "POST", "url": "/v1/completions", "body": {}}\r\n'
    text = codecs.BOM_UTF8 + line % 1 + b"\r\n" + line % 2
    assert await batch_lines.check(cut(text, Random(1)), "/v1/completions") == (2, [])


async def test_others_have_their_turns_while_a_file_is_read() -> None:
    """All of it is there at once, and its lines are read in slices."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def whole() -> AsyncIterator[bytes]:
        yield b"\n".join([b"{}"] * 6400)

    beside = asyncio.create_task(others())
    assert len([line async for line in batch_lines.lines_of(whole())]) == 6400
    beside.cancel()
    assert turns >= 6400 / batch_lines.TURN_LINES - 2


async def test_no_more_lines_than_the_limit() -> None:
    async def many() -> AsyncIterator[bytes]:
        for n in range(batch_lines.LINES_LIMIT + 1):
            line = {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": {}}
            yield json.dumps(line).encode() + b"\n"

    _, errors = await batch_lines.check(many(), "/v1/completions")
    assert [error.code for error in errors] == ["too_many_tasks"]
