"""For tests of the client: the output of a request as a log, a server that streams it, and a reader
that checks what the client shows of it.
"""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from shared import subjects
from shared.bus.api import Call, Endpoint
from shared.client.client import Handle
from shared.schemas import (
    Attach,
    Cancel,
    Delta,
    End,
    GenerateRequest,
    Likelihood,
    Received,
    Refused,
    Replay,
    Status,
    StreamEvent,
    TokenLogprob,
    Verdict,
)
from shared.vocabulary import FinishReason, ServiceClass
from tests import made
from tests.simulated.bus import SimBus


def verdict(tokens: int, reason: FinishReason = FinishReason.LENGTH) -> Verdict:
    return made.verdict(finish_reason=reason, prompt_tokens=1, output_tokens=tokens)


def likely(tokens: list[int]) -> list[TokenLogprob]:
    return [TokenLogprob(Likelihood(token, b"", -0.1 * token)) for token in tokens]


@dataclass
class Log:
    """The output of one request: entries of tokens and text. Either may be empty (text is held back
    for stop strings).
    """

    entries: list[tuple[list[int], str]]

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.entries for token in tokens]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.entries)

    def deltas(self) -> list[Delta]:
        out, offset, text_offset = [], 0, 0
        for number, (tokens, text) in enumerate(self.entries):
            last = number == len(self.entries) - 1
            out.append(
                Delta(
                    attempt=1,
                    offset=offset,
                    tokens=tokens,
                    text=text,
                    text_offset=text_offset,
                    logprobs=likely(tokens),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            )
            offset, text_offset = offset + len(tokens), text_offset + len(text)
        return out

    def replay(self, from_token: int, made: int, ended: Verdict | None) -> Replay:
        """The truth about the first `made` entries, with as little text before token `from_token`
        as can be: from 0 on it is all.
        """
        known = Log(self.entries[:made])
        text_offset, seen = 0, 0
        for tokens, text in known.entries:
            if from_token == 0 or seen + len(tokens) > from_token:
                break
            seen += len(tokens)
            text_offset += len(text)
        return Replay(
            stream_subject="_INBOX.c.1",
            offset=min(from_token, len(known.tokens)),
            tokens=known.tokens[from_token:],
            text=known.text[text_offset:],
            text_offset=text_offset,
            verdict=ended,
            logprobs=likely(known.tokens[from_token:]),
        )


@st.composite
def logs(draw: st.DrawFn) -> Log:
    counter = iter(range(10_000))
    sizes = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=15))
    sizes[0] = (max(1, sizes[0][0]), sizes[0][1])  # no text without a token
    return Log(
        [
            (
                [next(counter) for _ in range(n)],
                "".join(chr(97 + next(counter) % 26) for _ in range(m)),
            )
            for n, m in sizes
        ]
    )


class Reader:
    """The output that a client would show, checked at every step against the log."""

    def __init__(self, log: Log) -> None:
        self.log, self.tokens, self.text, self.ends = log, list[int](), "", 0

    def show(self, events: list[StreamEvent]) -> None:
        for event in events:
            assert self.ends == 0, "nothing comes after the end"
            if isinstance(event, Delta):
                assert (event.offset, event.text_offset) == (len(self.tokens), len(self.text))
                assert event.logprobs == likely(event.tokens)
                self.tokens += event.tokens
                self.text += event.text
            elif isinstance(event, End):
                self.ends += 1
        assert self.tokens == self.log.tokens[: len(self.tokens)]
        assert self.text == self.log.text[: len(self.text)]


@dataclass
class Server:
    """Admission and worker in one: streams a log of its own for every request, and tells the truth
    when asked.
    """

    bus: SimBus
    log: Log
    pause_s: float = 0.02
    asked: dict[str, GenerateRequest] = field(default_factory=dict)
    subjects: dict[str, str] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)
    cancelled: Counter[str] = field(default_factory=Counter)
    deaf: int = 0  # requests that are not answered
    attaches: int = 0
    hang: bool = False
    refuse: bool = False
    storeless: int = 0  # attaches that are refused because the store does not answer
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        await self.bus.serve(
            "admission",
            [
                Endpoint("requests", subjects.REQUESTS, GenerateRequest, self.on_request, "q"),
                Endpoint("attach", subjects.ATTACHES, Attach, self.on_attach, "q"),
            ],
            {},
        )
        await self.bus.subscribe(subjects.CANCELS, Cancel, self.on_cancel)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_request(self, request: GenerateRequest, call: Call) -> None:
        if self.deaf:
            self.deaf -= 1
            return
        if self.refuse:
            self.spawn(call.reply(Refused(code="slow_down", message="no room")))
            return
        key = f"{request.tenant}.{request.request_id}"
        attached = key in self.asked
        if not attached:
            self.asked[key] = request
            self.subjects[key] = request.inbox or subjects.stream(
                subjects.request_key(request.tenant, request.request_id)
            )
            self.made[key] = 0
            self.spawn(self.generate(key))
        received = Received(
            request_id=request.request_id,
            stream_subject=self.subjects[key],
            arrived_unix_s=0.0,
            prompt_tokens=1,
            attached=attached,
        )
        self.spawn(call.reply(received))

    async def generate(self, key: str) -> None:
        status = Status(state="accepted", service_class=ServiceClass.STANDARD, attempt=1)
        await self.bus.publish(self.subjects[key], status)
        for delta in self.log.deltas():
            if self.hang:
                return
            self.made[key] += 1
            await self.bus.publish(self.subjects[key], delta)
            await asyncio.sleep(self.pause_s)
        await self.bus.publish(self.subjects[key], End(verdict=verdict(len(self.log.tokens))))

    def on_attach(self, attach: Attach, call: Call) -> None:
        self.attaches += 1
        key = f"{attach.tenant}.{attach.request_id}"
        if self.attaches <= self.storeless:
            message = "the store did not answer"
            self.spawn(call.reply(Refused(code="server_is_overloaded", message=message)))
            return
        if key not in self.asked:
            self.spawn(call.reply(Refused(code="not_found", message="no such request")))
            return
        made = self.made[key]
        ended = verdict(len(self.log.tokens)) if made == len(self.log.entries) else None
        self.spawn(call.reply(self.log.replay(attach.from_token, made, ended)))

    def on_cancel(self, cancel: Cancel, call: Call) -> None:
        key = call.subject.removeprefix("slo.v1.cancel.")
        self.cancelled[key] += 1
        if self.hang:
            self.spawn(
                self.bus.publish(
                    self.subjects[key], End(verdict=verdict(0, FinishReason.CANCELLED))
                )
            )


LOG = Log([([2 * i, 2 * i + 1], f"word{i} ") for i in range(40)])


async def read(handle: Handle, log: Log) -> Reader:
    reader = Reader(log)
    async for event in handle:
        reader.show([event])
    return reader
