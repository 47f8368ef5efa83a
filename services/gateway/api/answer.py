"""Writes one HTTP response from the events of its requests: a stream, or one JSON body. Nothing is
queued: events that have come are written, up to TOGETHER_BYTES, before the next is read. Behind a
slow reader, handles drop events beyond a bound, and read them again from the log.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, assert_never

from msgspec import UNSET, UnsetType
from starlette.types import Message, Send

from services.gateway.api.api_format import (
    ChoiceVerdict,
    CompletionDetails,
    Head,
    Output,
    PromptDetails,
    Usage,
    told,
)
from services.gateway.api.translate import Ask
from services.gateway.http.deadline import Deadline
from services.gateway.http.envelope import Problem, of_error, of_verdict
from shared.client.client import Handle
from shared.errors import BusError, PeerError
from shared.schemas import Delta, End, Status, StreamEvent, Verdict
from shared.vocabulary import ServiceClass

FLEX = "flex"  # the service tier of a relegated request
TOGETHER_BYTES = 16 * 1024  # some 60 events
COMMENT = b": waiting\n\n"


class ReaderStalled(Exception):
    """The client has read nothing for `stall_s`; it counts as gone."""


class Heard(NamedTuple):
    """News of one choice. A verdict in it is a good one: others are Problems."""

    choice: int
    news: Delta | Status | Verdict


class Answer:
    """One response; implements SoFar. `status` 0: no head yet. `problem`: the failure, or None."""

    def __init__(
        self,
        ask: Ask,
        handles: Sequence[Handle],
        send: Send,
        *,
        default_model: Callable[[], str],
        created_unix_s: float,
        keepalive_s: float,
        stall_s: float,
    ) -> None:
        self.status = 0
        self.problem: Problem | None = None
        self.lost = False  # it failed since its events did not come; its requests go on
        self.verdicts: dict[int, Verdict] = {}  # by choice, in the order of their ends
        self._ask = ask
        self._model, self._default_model = ask.model, default_model
        self._count = len(handles)
        self._n = ask.n
        self._prompt_tokens = sum(
            handle.received.prompt_tokens
            for handle in handles[:: ask.n]
            if handle.received is not None
        )
        self._tokens = 0  # of all choices so far
        self._events = Merge(handles)
        received = [handle.received for handle in handles]
        self._writers = [
            ask.api_format.writer(
                index, ask.request_id, one.tool_format if one else "", one.thinking if one else None
            )
            for index, one in enumerate(received)
        ]
        self._send_message = send
        self._frame = ask.api_format.frame(
            Head(ask.request_id, int(created_unix_s), ask.include_usage, ask.usage_so_far)
        )
        self._silence = Deadline(keepalive_s if ask.stream else None)
        self._stall = Deadline(stall_s)
        self._placed: set[int] = set()  # choices with at least one event
        self._opened = False
        self._relegated = False

    @property
    def over(self) -> bool:
        """True once no further event can come."""
        return self.problem is not None or len(self.verdicts) == self._count

    @property
    def model(self) -> str:
        """The model that was named, else the fleet's, which may be known only once it answers."""
        self._model = self._model or self._default_model()
        return self._model

    @property
    def service_tier(self) -> str:
        """The tier actually used, as far as it is known: flex if any choice was relegated."""
        return FLEX if self._relegated else self._ask.service_tier

    @property
    def usage(self) -> Usage:
        """Usage so far: the output of all choices, and each prompt once."""
        prompts, made = self._prompt_tokens, self._tokens
        # choice 0 of each prompt counts it
        cached = sum(v.cached_tokens for index, v in self.verdicts.items() if not index % self._n)
        thinking = sum(verdict.thinking_tokens for verdict in self.verdicts.values())
        return Usage(
            prompt_tokens=prompts,
            completion_tokens=made,
            total_tokens=prompts + made,
            prompt_tokens_details=PromptDetails(cached_tokens=cached),
            completion_tokens_details=CompletionDetails(reasoning_tokens=thinking)
            if thinking
            else UNSET,
        )

    @property
    def ended_unix_s(self) -> int:
        return int(max((verdict.ended_unix_s for verdict in self.verdicts.values()), default=0))

    @property
    def told_verdicts(self) -> Sequence[ChoiceVerdict] | UnsetType:
        if not self._ask.with_verdicts or len(self.verdicts) < self._count:
            return UNSET
        return [told(self.verdicts[index]) for index in range(self._count)]

    async def run(self) -> None:
        """Writes the response. Raises ReaderStalled."""
        await (self._stream() if self._ask.stream else self._whole())

    async def _whole(self) -> None:
        outputs = [Output() for _ in self._writers]
        while not self.over:
            heard = await self._next()
            if isinstance(heard, Problem):
                await self._refuse(heard)
                return
            if heard is not None and isinstance(heard.news, Delta):
                outputs[heard.choice].take(heard.news)
        reasons = [self.verdicts[index].finish_reason.value for index in range(self._count)]
        choices = [
            writer.whole(output, reason)
            for writer, output, reason in zip(self._writers, outputs, reasons, strict=True)
        ]
        body = self._frame.whole(choices, self)
        await self._start(200, {"content-type": "application/json"})
        await self._send(body, more=False)

    async def _stream(self) -> None:
        """Writes the stream. Its head waits for an event of every choice, so that a refusal keeps
        its status, but no longer than the first text or `keepalive_s`. An answer that may not be
        relegated can be refused until its first text, so its head waits for that. A format may not
        compile, so the head waits for the first text up to `keepalive_s`.
        """
        first = self._ask.requests[0]
        patient = not first.allow_relegation
        formatted = first.sampling.structured is not None
        body = b""
        while True:
            heard = await self._next()
            if isinstance(heard, Problem):
                await self.fail(heard, body)
                return
            if self.status == 0 and patient and heard is None:
                continue
            if (
                heard is not None
                and isinstance(heard.news, Status)
                and self.status == 0
                and (patient or formatted or len(self._placed) < self._count)
            ):
                continue
            body += COMMENT if heard is None else self._written(heard)
            over = self.over
            if over:
                body += self._frame.end(self)
            if self.status == 0:
                await self._start(
                    200,
                    {
                        "content-type": "text/event-stream; charset=utf-8",
                        "cache-control": "no-store",
                    },
                )
            elif self._events.ready and not over and len(body) < TOGETHER_BYTES:
                continue
            if body:  # none while text may begin a call
                await self._send(body, more=not over)
                body = b""
            if over:
                return

    async def fail(self, problem: Problem, body: bytes = b"") -> None:
        """Write the end of an answer that has failed, behind `body`, which is still unwritten."""
        if self.status == 0:
            await self._refuse(problem)
        elif self._ask.stream:
            await self._send(body + self._frame.failure(problem, self), more=False)

    async def _next(self) -> Heard | Problem | None:
        """The next event to write; None after a silence of `keepalive_s` in a stream."""
        try:
            with self._silence:
                index, event = await self._events.next()
        except TimeoutError:
            return None
        except (PeerError, BusError) as lost:
            self.problem, self.lost = of_error(lost), True
            return self.problem
        self._placed.add(index)
        match event:
            case Delta():
                self._tokens += len(event.tokens)
                return Heard(index, event)
            case Status():
                self._relegated |= event.service_class is ServiceClass.BEST_EFFORT
                return Heard(index, event)
            case End():
                self.verdicts[index] = event.verdict
                self._relegated |= event.verdict.relegated
                self.problem = of_verdict(event.verdict, flex=self._ask.flex)
                return self.problem or Heard(index, event.verdict)
            case _:
                assert_never(event)

    def _written(self, heard: Heard) -> bytes:
        writer = self._writers[heard.choice]
        match heard.news:
            case Delta():
                chunks = writer.say(heard.news)
            case Verdict():
                chunks = writer.close(heard.news.finish_reason.value)
            case Status():
                return COMMENT
            case _:
                assert_never(heard.news)
        return self._opening() + self._frame.chunks(chunks, self)

    def _opening(self) -> bytes:
        """The opening chunks of all choices, once, before any text, as clients expect them."""
        if self._opened:
            return b""
        self._opened = True
        opening = [chunk for writer in self._writers for chunk in writer.open()]
        return self._frame.chunks(opening, self)

    async def _refuse(self, problem: Problem) -> None:
        await self._start(problem.status, {"content-type": "application/json", **problem.headers()})
        await self._send(self._frame.refusal(problem), more=False)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, body: bytes, *, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": more})

    async def _put(self, message: Message) -> None:
        """Sends a message. Returns once the socket has room again."""
        try:
            with self._stall:
                await self._send_message(message)
        except TimeoutError:
            raise ReaderStalled from None


class Merge:
    """Reads handles in turns, so that none waits behind a busy one. Nothing is queued here."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles
        self._turn = 0
        self._wake = asyncio.Event()
        for handle in handles:
            handle.wake = self._wake

    @property
    def ready(self) -> bool:
        """True if some event has come already."""
        return any(handle.unread for handle in self._handles)

    async def next(self) -> tuple[int, StreamEvent]:
        """The number of a handle, and its next event; may be cancelled and repeated. Raises any
        handle's failure. Call it only while some handle has not given its End.
        """
        count = len(self._handles)
        while True:
            for step in range(count):
                number = (self._turn + step) % count
                if (event := self._handles[number].take()) is not None:
                    self._turn = (number + 1) % count
                    return number, event
            self._wake.clear()
            await self._wake.wait()
