"""From the events of one request to an HTTP response: a stream of server-sent events, or one JSON body.

Nothing is queued here: an event is written before the next one is taken. Behind a slow reader the handle keeps a bounded number
of events, drops the rest, and reads them again from the log once the reader has caught up.
"""

import asyncio
import math
from collections.abc import Mapping
from typing import assert_never

import msgspec
from msgspec import UNSET
from starlette.types import Message, Send

from services.gateway.completions import Choice, Completion, Usage
from services.gateway.envelope import Problem, of_error, of_verdict
from services.gateway.intake import Ask
from shared.client import Handle
from shared.errors import BusError, PeerError
from shared.schemas import Delta, End, Status, StreamEvent, Verdict
from shared.vocabulary import ServiceClass

FLEX = "flex"  # what a relegated request was served as
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
_encode = msgspec.json.Encoder().encode


class ReaderStalled(Exception):
    """The client has read nothing for longer than it may; it counts as gone."""


class Answer:
    """One response. `status` is 0 until its head has been sent, `over` once nothing more can come, with a `verdict` or without."""

    def __init__(
        self, ask: Ask, handle: Handle, send: Send, *, model: str, created_unix_s: float, keepalive_s: float, stall_s: float
    ) -> None:
        self.status = 0
        self.over = False
        self.verdict: Verdict | None = None
        self._ask = ask
        self._handle = handle
        self._send_message = send
        self._model = ask.request.model or model
        self._created = int(created_unix_s)
        self._keepalive_s = keepalive_s
        self._stall_s = stall_s
        self._relegated = False

    @property
    def service_tier(self) -> str:
        """The one actually used, as far as is known by now."""
        return FLEX if self._relegated else self._ask.service_tier

    async def run(self) -> None:
        """Raises ReaderStalled."""
        await (self._stream() if self._ask.stream else self._whole())

    async def _whole(self) -> None:
        text: list[str] = []
        tokens: list[int] = []
        while True:
            event = await self._next(math.inf)
            match event:
                case Delta():
                    text.append(event.text)
                    tokens += event.tokens
                case Problem():
                    await self._refuse(event)
                    return
                case Verdict():
                    body = self._completion([self._choice("".join(text), tokens, event)], self._usage(event))
                    await self._start(200, {"content-type": "application/json"})
                    await self._send(_encode(body), more=False)
                    return
                case None:
                    pass
                case _:
                    assert_never(event)

    async def _stream(self) -> None:
        """The head waits for the first event, so that a refusal has its status; not longer than `keepalive_s`, for proxies."""
        while True:
            event = await self._next(self._keepalive_s)
            if isinstance(event, Problem) and self.status == 0:
                await self._refuse(event)
                return
            if self.status == 0:
                await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"})
            match event:
                case Delta():
                    await self._send(self._chunk([self._choice(event.text, event.tokens, None)]))
                case Problem():
                    await self._send(b"data: " + event.body() + b"\n\n", more=False)
                    return
                case Verdict():
                    last = self._chunk([self._choice("", [], event)])
                    if self._ask.include_usage:
                        last += self._chunk([], self._usage(event))
                    await self._send(last + DONE, more=False)
                    return
                case None:
                    await self._send(COMMENT)
                case _:
                    assert_never(event)

    async def _next(self, patience_s: float) -> Delta | Problem | Verdict | None:
        """What to tell the client next; None when there is nothing to tell: a status, or silence for `patience_s`."""
        try:
            event = await self._event(patience_s)
        except (PeerError, BusError) as lost:
            self.over = True
            return of_error(lost)
        match event:
            case Delta() | None:
                return event
            case Status():
                self._relegated |= event.service_class is ServiceClass.BEST_EFFORT
                return None
            case End():
                self.over, self.verdict, self._relegated = True, event.verdict, event.verdict.relegated
                return of_verdict(event.verdict, flex=self._ask.flex) or event.verdict
            case _:
                assert_never(event)

    async def _event(self, patience_s: float) -> StreamEvent | None:
        """The handle may be waited for in vain and asked again."""
        if patience_s == math.inf:
            return await anext(self._handle)
        try:
            async with asyncio.timeout(patience_s):
                return await anext(self._handle)
        except TimeoutError:
            return None

    def _choice(self, text: str, tokens: list[int], verdict: Verdict | None) -> Choice:
        return Choice(
            text=text,
            finish_reason=None if verdict is None else verdict.finish_reason.value,
            token_ids=tokens if self._ask.return_token_ids else UNSET,
        )

    def _usage(self, verdict: Verdict) -> Usage:
        prompt, output = verdict.prompt_tokens, verdict.output_tokens
        return Usage(prompt_tokens=prompt, completion_tokens=output, total_tokens=prompt + output)

    def _completion(self, choices: list[Choice], usage: Usage | None) -> Completion:
        return Completion(
            id=f"cmpl-{self._ask.request.request_id}",
            created=self._created,
            model=self._model,
            choices=choices,
            service_tier=self.service_tier,
            usage=UNSET if usage is None and not self._ask.include_usage else usage,
        )

    def _chunk(self, choices: list[Choice], usage: Usage | None = None) -> bytes:
        return b"data: " + _encode(self._completion(choices, usage)) + b"\n\n"

    async def _refuse(self, problem: Problem) -> None:
        await self._start(problem.status, {"content-type": "application/json", **problem.headers()})
        await self._send(problem.body(), more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: Message) -> None:
        """Returns once the socket has room again."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send_message(message)
        except TimeoutError:
            raise ReaderStalled from None
