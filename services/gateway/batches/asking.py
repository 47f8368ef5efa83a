"""Asks the fleet one line of a batch, as if it came over HTTP, and again while there is no room.
The request has the line's id, so any gateway attaches to one that runs already. After a request
that ended badly through no fault of its own (dropped, cancelled), the next one has a new id.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace
from starlette.types import Message

from services.gateway.api import chats, completions, translate
from services.gateway.api.alive import Fleet
from services.gateway.api.chats import ChatBody
from services.gateway.api.completions import CompletionBody
from services.gateway.api.generation import Generations
from services.gateway.api.responses import responses
from services.gateway.http import envelope, slo_headers
from services.gateway.http import headers as request_headers
from services.gateway.http.envelope import Problem
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.rules.rules import Rules

TIER = "batch"
AGAIN_S = 2.0  # first pause before a request that found no room, or no service, is asked again
AGAIN_LIMIT_S = 30.0
LOST = 503  # the answer broke off before its verdict: no verdict has this status
EXPIRED = 504
TRANSIENT = (429, 499, LOST)
NO_STREAM = Problem(
    status=400,
    message="a request of a batch cannot be streamed",
    code="unsupported_parameter",
    param="stream",
)
READERS: dict[str, Callable[[bytes], CompletionBody | ChatBody]] = {
    "/v1/chat/completions": chats.read_body,
    "/v1/completions": completions.read_body,
    "/v1/responses": responses.read_body,
}


class LineAnswer(NamedTuple):
    status: int
    request_id: str
    body: bytes


class LineRequest(NamedTuple):
    endpoint: str
    tenant: str
    request_id: str
    body: bytes
    ttlt_s: float
    expires_unix_s: float
    stop: asyncio.Event  # the batch is cancelled, or its time is over


class BatchAsker:
    def __init__(self, generations: Generations, fleet: Fleet, rules: Rules, clock: Clock) -> None:
        self._generations, self._fleet = generations, fleet
        self._rules, self._clock = rules, clock

    async def ask(self, line: LineRequest) -> LineAnswer | None:
        """The answer, good or bad; None if the line is not to be asked any more."""
        attempt, pause_s = 0, AGAIN_S
        while not line.stop.is_set():
            request_id = line.request_id if not attempt else f"{line.request_id}-{attempt}"
            taken = False  # a request with this id has ended
            try:
                answered = await self._once(line, request_id)
                taken = answered.status != LOST
            except (PeerError, BusError) as error:
                problem = envelope.of_error(error)
                answered = LineAnswer(problem.status, request_id, problem.body())
            if answered.status == EXPIRED or (line.stop.is_set() and answered.status != 200):
                return None
            if answered.status not in TRANSIENT:
                return answered
            if taken:
                attempt += 1
            try:
                async with asyncio.timeout(pause_s):
                    await line.stop.wait()
            except TimeoutError:
                pass
            pause_s = min(2 * pause_s, AGAIN_LIMIT_S)
        return None

    async def _once(self, line: LineRequest, request_id: str) -> LineAnswer:
        """Ask once. Raises PeerError or BusError if no request was stored, or nobody knows."""
        tiers = self._rules.tiers
        try:
            body = READERS[line.endpoint](line.body)
            if body.stream:
                return LineAnswer(NO_STREAM.status, request_id, NO_STREAM.body())
            ask = translate.read_ask(
                {
                    request_headers.IDEMPOTENCY_KEY: request_id,
                    request_headers.TIER_HEADERS[0]: TIER if TIER in tiers.tiers else tiers.default,
                    slo_headers.SLO_HEADERS["ttlt_s"][0]: repr(1e3 * line.ttlt_s),
                },
                body,
                request_id,
                line.tenant,
                tiers,
                self._fleet,
            )
        except PeerError as error:
            problem = envelope.of_error(error)
            return LineAnswer(problem.status, request_id, problem.body())
        now = self._clock.unix_s()
        left_s = max(1.0, line.expires_unix_s - now)
        requests = [replace(r, expires_s=left_s) for r in ask.requests]
        ask = ask._replace(requests=requests, persistent=True)
        status, parts = 0, list[bytes]()

        async def receive() -> Message:
            await line.stop.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        await self._generations.run(ask, None, receive, send, now)
        return LineAnswer(status, request_id, b"".join(parts))


def as_raw(body: bytes) -> msgspec.Raw:
    return msgspec.Raw(body or b"null")
