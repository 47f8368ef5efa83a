"""Stores a batch's results: two files, of answers and of errors, with a line for each request."""

import asyncio

import msgspec
from msgspec import Struct

from services.gateway.batches.lines import TURN_LINES
from services.gateway.http.json_bytes import encode
from shared.bus.objects import Digest, Objects
from shared.errors import BusError, WrongSequence
from shared.process import logs

AGAIN_S = 1.0  # until an append that failed is tried again: the bucket may be full
ID = "batch_req_"
# a line that a message cannot carry is replaced by an error
LINE_LIMIT_BYTES = 8 * 1024 * 1024 - 4096


class LineResponse(Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class ResultError(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Result(Struct, frozen=True, kw_only=True):
    """The line of one request: its answer, good or bad, or an error of the batch."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: ResultError | None


class _Id(Struct):
    id: str


_id = msgspec.json.Decoder(_Id)
log = logs.logger()


class Superseded(Exception):
    """Another process has taken the batch over."""


class ResultFile:
    """One of the two files. A file has one writer: `take_over` ends the writer before."""

    def __init__(self, objects: Objects, chunks: str, ttl_s: float) -> None:
        self.done: set[int] = set()  # the numbers of its lines
        self.digest = Digest()
        self.chunks = chunks
        self._objects, self._ttl_s = objects, ttl_s
        self._last = 0
        self._writing = asyncio.Lock()

    async def take_over(self) -> None:
        """Read the lines stored so far, and append an empty chunk: a process that has not read it
        can append no more. Raises BusError.
        """
        while True:
            self.done, self.digest, self._last = set(), Digest(), 0
            async for seq, payload in self._objects.read(self.chunks):
                self._take(seq, payload)
                if self.digest.chunks % TURN_LINES == 0:
                    await asyncio.sleep(0)
            try:
                seq = await self._objects.append(self.chunks, b"", self._last, ttl_s=self._ttl_s)
            except WrongSequence:
                continue
            self._take(seq, b"")
            return

    async def add(self, result: Result) -> None:
        """Append a line, and wait while the store takes none. Raises Superseded."""
        payload = encode(result) + b"\n"
        if len(payload) > LINE_LIMIT_BYTES:
            error = ResultError(code="answer_too_large", message="the answer is too large to store")
            payload = encode(
                Result(id=result.id, custom_id=result.custom_id, response=None, error=error)
            )
            payload += b"\n"
        async with self._writing:
            while True:
                try:
                    seq = await self._objects.append(
                        self.chunks, payload, self._last, ttl_s=self._ttl_s
                    )
                except WrongSequence as error:
                    last = await self._last_chunk()
                    if last is None or last[1] != payload:
                        raise Superseded(self.chunks) from error
                    seq = last[0]  # the answer to our append was lost
                except BusError:
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._take(seq, payload)
                return

    async def _last_chunk(self) -> tuple[int, bytes] | None:
        while True:
            try:
                return await self._objects.last(self.chunks)
            except BusError:
                await asyncio.sleep(AGAIN_S)

    def _take(self, seq: int, payload: bytes) -> None:
        self._last = seq
        self.digest.take(payload)
        if payload:
            try:
                self.done.add(int(_id.decode(payload).id.rpartition("-")[2]))
            except (msgspec.MsgspecError, ValueError):
                log.error("result.damaged", file_id=self.chunks, seq=seq)  # no gateway wrote it


def id_of(batch_id: str, number: int) -> str:
    return f"{batch_id.removeprefix('batch_')}-{number}"
