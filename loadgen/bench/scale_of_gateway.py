"""The tokens a second that one gateway streams over HTTP, and two.

The bench plays admission, worker and clients: as soon as every stream has its last token but
AHEAD, each gets the next one.
"""

import asyncio
import json
from types import TracebackType
from typing import Self

from loadgen.bench.figure import Figure
from loadgen.bench.lone_services import lone_services
from loadgen.bench.scale_of_admission import REPLICAS, digest
from loadgen.fleet.child import Say
from loadgen.fleet.ports import free_port
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.process.chores import Chores
from shared.schemas import Delta, GenerateRequest, Received

PART = "scale, gateway"
STREAMS, QUICK_STREAMS = 400, 8
AHEAD = 8  # tokens of each stream on their way at a time
MEASURE_S, QUICK_S = 8.0, 1.0
SETTLE_S = 1.0
DIGEST_S = 0.2
LEAST = 20_000
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


class Streams:
    """Clients of the gateways, and a fleet that feeds their streams; use it as an async context."""

    def __init__(self, bus: Bus, clock: Clock, addresses: list[tuple[str, int]]) -> None:
        self._bus, self._clock, self._addresses = bus, clock, addresses
        self._chores = Chores()
        self._tasks: list[asyncio.Task[None]] = []
        self._subjects: list[str] = []  # of the streams' events
        self._counters: list[EventCounter] = []
        self._transports: list[asyncio.Transport] = []

    @property
    def tokens(self) -> int:
        """The tokens that all clients have read."""
        return sum(counter.events for counter in self._counters)

    async def __aenter__(self) -> Self:
        await self._chores.__aenter__()
        endpoint = Endpoint("requests", subjects.REQUESTS, GenerateRequest, self._on_request)
        self._chores.listen(await self._bus.serve("requests", [endpoint], {}))
        self._tasks.append(self._chores.start(self._tell(), "bench.digests"))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        for transport in self._transports:
            transport.abort()
        await self._chores.__aexit__(kind, error, trace)

    async def open(self, count: int) -> None:
        """Open so many streams, the same number at each gateway, and feed them."""
        loop = asyncio.get_running_loop()
        for n in range(count):
            host, port = self._addresses[n % len(self._addresses)]
            transport, counter = await loop.create_connection(EventCounter, host, port)
            transport.write(_question(f"{host}:{port}"))
            self._transports.append(transport)
            self._counters.append(counter)
        async with asyncio.timeout(HEAD_S):
            while len(self._subjects) < count:
                await asyncio.sleep(0.01)
        self._tasks.append(self._chores.start(self._feed(), "bench.feed"))

    async def _feed(self) -> None:
        sent = 0
        while True:
            delta = Delta(
                attempt=1,
                offset=sent,
                tokens=[TOKEN],
                text=TEXT,
                text_offset=sent * len(TEXT),
            )
            for subject in self._subjects:
                await self._bus.publish(subject, delta)
            sent += 1
            while min(counter.events for counter in self._counters) <= sent - AHEAD:
                await asyncio.sleep(0.001)

    async def _tell(self) -> None:
        while True:
            now_unix_s = self._clock.unix_s()
            await self._bus.publish(subjects.digest(REPLICAS[0]), digest(REPLICAS[0], now_unix_s))
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


def _question(host: str) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True})
    lines = ("POST /v1/completions HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", body)).encode()


async def measure(quick: bool, say: Say) -> list[Figure]:
    one, two = [await _with_gateways(n, quick, say) for n in (1, 2)]
    return one + two


async def _with_gateways(gateways: int, quick: bool, say: Say) -> list[Figure]:
    clock, count = Clock(), QUICK_STREAMS if quick else STREAMS
    async with lone_services([], say) as services:
        addresses = [("127.0.0.1", free_port()) for _ in range(gateways)]
        for _, port in addresses:
            await services.start("gateway", {"SLACKLINE_GATEWAY_PORT": str(port)})
        async with Streams(services.bus, clock, addresses) as streams:
            await streams.open(count)
            await asyncio.sleep(SETTLE_S)
            tokens, cpu_s, unix_s = streams.tokens, services.cpu_s(), clock.unix_s()
            await asyncio.sleep(QUICK_S if quick else MEASURE_S)
            tokens = streams.tokens - tokens
            took_s, used_s = clock.unix_s() - unix_s, services.cpu_s() - cpu_s
    say(f"  {gateways} x gateway: {tokens / took_s:,.0f} tokens/s")
    name, least = (f"{gateways} of them: ", None) if gateways > 1 else ("", LEAST)
    return [
        Figure(
            part=PART,
            name=f"{name}tokens streamed, an event each",
            value=tokens / took_s,
            unit="tokens/s",
            least=least,
            note=f"{count} streams; {used_s / took_s:.2f} cores",
        ),
        Figure(
            part=PART,
            name=f"{name}CPU of a token",
            value=used_s / tokens if tokens else None,
            unit="us",
        ),
        Figure(
            part=PART,
            name=f"{name}tokens of a core, by that CPU",
            value=tokens / used_s if used_s else None,
            unit="tokens/s",
            least=least,
        ),
    ]
