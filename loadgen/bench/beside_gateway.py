"""Clients of the gateways, and a fleet that feeds their streams.

As soon as every stream has its last token but AHEAD, each gets the next one.
"""

import asyncio
import json

from loadgen.bench.beside import Beside, digest
from loadgen.bench.stand_in import INCARNATION, KV_BLOCKS
from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.schemas import Delta, GenerateRequest, Received
from shared.vocabulary import ReplicaId

STREAMS, QUICK_STREAMS = 400, 8
AHEAD = 8  # tokens of each stream on their way at a time
DIGEST_S = 0.2
REPLICA = ReplicaId("r1")
TOKEN, TEXT = 65, " word"
EVENT = b"data: {"  # begins each event
HEAD_S = 60.0


class EventCounter(asyncio.Protocol):
    """A client's side of a stream: it counts the events."""

    def __init__(self) -> None:
        self.events = 0
        self._rest = b""  # of the last piece: the beginning of an event may be cut

    def data_received(self, data: bytes) -> None:
        seen = self._rest + data
        self.events += seen.count(EVENT)
        self._rest = seen[1 - len(EVENT) :]


class BesideGateway(Beside):
    """A unit is a token that a client has read."""

    async def load(self, quick: bool) -> None:
        """The same number of streams at each gateway."""
        count = QUICK_STREAMS if quick else STREAMS
        self.note = f"{count} streams"
        self._before = 0
        self._subjects: list[str] = []  # of the streams' events
        self._counters: list[EventCounter] = []
        endpoint = Endpoint("requests", subjects.REQUESTS, GenerateRequest, self._on_request)
        self._chores.listen(await self._bus.serve("requests", [endpoint], {}))
        self._start(self._tell())
        loop = asyncio.get_running_loop()
        for n in range(count):
            port = self._ports[n % len(self._ports)]
            transport, counter = await loop.create_connection(EventCounter, "127.0.0.1", port)
            transport.write(_question(port))
            self._counters.append(counter)
        async with asyncio.timeout(HEAD_S):
            while len(self._subjects) < count:
                await asyncio.sleep(0.01)
        self._start(self._feed())

    def reset(self) -> None:
        self._before = self._read

    @property
    def done(self) -> int:
        return self._read - self._before

    @property
    def _read(self) -> int:
        return sum(counter.events for counter in self._counters)

    async def _feed(self) -> None:
        sent = 0
        while True:
            at = sent * len(TEXT)
            delta = Delta(attempt=1, offset=sent, tokens=[TOKEN], text=TEXT, text_offset=at)
            for subject in self._subjects:
                await self._bus.publish(subject, delta)
            sent += 1
            while min(counter.events for counter in self._counters) <= sent - AHEAD:
                await asyncio.sleep(0.001)

    async def _tell(self) -> None:
        while True:
            told = digest(REPLICA, INCARNATION, KV_BLOCKS, self._clock.unix_s())
            await self._bus.publish(subjects.digest(REPLICA), told)
            await asyncio.sleep(DIGEST_S)

    def _on_request(self, request: GenerateRequest, call: Call) -> None:
        assert request.inbox is not None, "a gateway names its inbox"
        received = Received(
            request_id=request.request_id,
            stream_subject=request.inbox,
            arrived_unix_s=self._clock.unix_s(),
            prompt_tokens=1,
        )
        self._chores.spawn(call.reply(received), "bench.received")
        self._subjects.append(request.inbox)


def _question(port: int) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
