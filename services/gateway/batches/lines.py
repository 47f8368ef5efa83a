"""Reads the lines of a batch's file one by one, however the file is cut into chunks."""

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncGenerator, AsyncIterator
from hashlib import sha256
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from services.gateway.batches.record import ERRORS_LIMIT, LineError

LINES_LIMIT = 50_000
TURN_LINES = 64  # read in one turn of the loop: 0.3 ms; others have theirs between
LINE_LIMIT_BYTES = 8 * 1024 * 1024 - 64 * 1024  # as a body over HTTP


class Line(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request of the file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class Numbered(NamedTuple):
    number: int  # from 1, empty lines counted
    raw: bytes


_line = msgspec.json.Decoder(Line)


async def lines_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Numbered, None]:
    """The lines that are not empty. One too long comes cut off, at once, and is the last."""
    kept, number = bytearray(), 0
    async for chunk in chunks:
        kept += chunk
        if not number and len(kept) >= len(BOM_UTF8):
            kept = kept.removeprefix(BOM_UTF8)
        *whole, rest = kept.split(b"\n")
        for raw in whole:
            number += 1
            if number % TURN_LINES == 0:
                await asyncio.sleep(0)
            if raw.strip():
                yield Numbered(number, bytes(raw))
        kept = rest
        if len(kept) > LINE_LIMIT_BYTES:
            break
    if kept.strip():
        yield Numbered(number + 1, bytes(kept))


def read(raw: bytes) -> Line:
    """A line that was checked before."""
    return _line.decode(raw)


async def check(chunks: AsyncIterator[bytes], endpoint: str) -> tuple[int, list[LineError]]:
    """The number of lines that the file has, and the faults of the file."""
    errors: list[LineError] = []
    seen: set[bytes] = set()
    count = 0
    async for number, raw in lines_of(chunks):
        count += 1
        if len(errors) >= ERRORS_LIMIT:
            break
        if count > LINES_LIMIT:
            message = f"the file has more than {LINES_LIMIT} lines"
            errors.append(LineError(code="too_many_tasks", message=message))
            break
        error = _error(number, raw, endpoint, seen)
        if error is not None:
            errors.append(error)
    if not count:
        errors.append(LineError(code="empty_file", message="the file has no line"))
    return count, errors


def _error(number: int, raw: bytes, endpoint: str, seen: set[bytes]) -> LineError | None:
    if len(raw) > LINE_LIMIT_BYTES:
        message = f"the line has more than {LINE_LIMIT_BYTES} bytes"
        return LineError(code="line_too_long", message=message, line=number)
    try:
        line = _line.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        return LineError(code="invalid_json_line", message=str(wrong)[:300], line=number)
    if line.url != endpoint:
        message = f"the url must be that of the batch, {endpoint}"
        return LineError(code="mismatched_endpoint", message=message, line=number, param="url")
    name = sha256(line.custom_id.encode(errors="surrogatepass")).digest()[:16]
    if name in seen:
        message = "another line has this custom_id"
        return LineError(
            code="duplicate_custom_id", message=message, line=number, param="custom_id"
        )
    seen.add(name)
    return None
