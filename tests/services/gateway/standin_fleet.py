"""A stand-in for admission and a worker on a real bus: it answers requests as their prompt says,
and keeps the requests.

Prompts: `refuse <code> [<param>]`, `end <finish reason>`, `relegate`, `break` (fails after two
tokens), `hang` (one token, then nothing until cancelled), `wait` (nothing at all until `go` is set,
or it is cancelled), `flood` (max_tokens long words), `mute` (max_tokens tokens without a text),
`silent` (no answer at the door); anything else: `says`, or max_tokens words, WORDS_LIMIT at most.
Each word is a token.

The prompt of a chat is its last message. A request for log-probabilities gets -0.5 - n for token n,
and as many of OTHERS (half a character, and an impossible token) as it asks for.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from shared import subjects
from shared.bus import codec
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.errors import PeerError
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
    Thinking,
    TokenLogprob,
    Verdict,
)
from shared.text.chat_prompt import checked
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass
from tests import made

MODEL = "stand-in"
WORDS_LIMIT = 200
PROMPT_TOKENS = 3  # of any prompt
OTHERS = [Likelihood(200, b"\xe2\x80", -0.25), Likelihood(201, "\u00e9".encode(), float("-inf"))]
FLOOD_WORD = " " + 1023 * "x"


def words(count: int) -> list[str]:
    return [f" w{n}" for n in range(count)]


class Running:
    """One request: its words so far, and its verdict."""

    def __init__(self, request: GenerateRequest, stream_subject: str) -> None:
        self.request = request
        self.stream_subject = stream_subject
        self.words: list[str] = []
        self.verdict: Verdict | None = None
        self.relegated = False
        self.cancelled = asyncio.Event()


class StandIn:
    """Answers requests as their prompts say, and keeps them for tests to look at."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup) -> None:
        self.go = asyncio.Event()
        self.asked: dict[RequestKey, Running] = {}
        self.tiers: dict[RequestKey, str] = {}
        self.traceparents: dict[RequestKey, str] = {}
        self.cancels: dict[RequestKey, str] = {}
        self.attaches = 0
        self.says: list[str] = []  # a whole answer, word by word
        self.thinking: Thinking | None = None  # its marks in that
        self._bus = bus
        self._tasks = tasks
        self._clock = Clock()

    async def digest(self, *adapters: str) -> None:
        """Publish once that a replica lives, and which adapters it has."""
        digest = made.digest(
            "r0",
            at_unix_s=self._clock.unix_s(),
            model=MODEL,
            kv_blocks=1,
            kv_free_blocks=1,
            free_slots=1,
            adapters=list(adapters),
        )
        await self._bus.publish(subjects.digest(ReplicaId("r0")), digest)
        await self._bus.flush(60.0)

    def on_request(self, request: GenerateRequest, call: Call) -> None:
        self._tasks.create_task(self._receive(request, call))

    def on_attach(self, attach: Attach, call: Call) -> None:
        self.attaches += 1
        running = self.asked.get(subjects.request_key(attach.tenant, attach.request_id))
        if running is None:
            self._tasks.create_task(
                call.reply(Refused(code="not_found", message="no such request"))
            )
            return
        start = min(attach.from_token, len(running.words))
        replay = Replay(
            stream_subject=running.stream_subject,
            offset=start,
            tokens=list(range(start, len(running.words))),
            text="".join(running.words[start:]),
            text_offset=len("".join(running.words[:start])),
            verdict=running.verdict,
        )
        self._tasks.create_task(call.reply(replay))

    def on_cancel(self, cancel: Cancel, call: Call) -> None:
        key = RequestKey(call.subject.removeprefix(f"{subjects.ROOT}.cancel."))
        self.cancels[key] = cancel.reason
        if key in self.asked:
            self.asked[key].cancelled.set()

    async def _receive(self, request: GenerateRequest, call: Call) -> None:
        key = subjects.request_key(request.tenant, request.request_id)
        prompt = (
            request.prompt
            if request.prompt is not None
            else " ".join(map(str, request.token_ids or []))
        )
        if request.messages is not None:
            try:
                prompt = checked(request.messages)[-1]["content"]
            except PeerError as error:
                await call.reply(codec.refusal(error))
                return
        if prompt.startswith("refuse "):
            code, *param = prompt.split()[1:]
            later = ("slow_down", "resource_unavailable", "rate_limit_exceeded")
            retry_after_s = 2.2 if code in later else None
            await call.reply(
                Refused(
                    code=code,
                    message=f"refused with {code}",
                    param=param[0] if param else "prompt",
                    retry_after_s=retry_after_s,
                )
            )
            return
        if prompt == "silent":
            return
        before = self.asked.get(key)
        running = before or Running(request, request.inbox or subjects.stream(key))
        self.asked[key] = running
        self.tiers[key] = call.subject.rpartition(".")[2]
        self.traceparents[key] = call.headers.get("traceparent", "")
        await call.reply(
            Received(
                request_id=request.request_id,
                stream_subject=running.stream_subject,
                arrived_unix_s=self._clock.unix_s(),
                prompt_tokens=PROMPT_TOKENS,
                thinking=self.thinking,
                attached=before is not None,
            )
        )
        if before is None:
            await self._run(running, prompt)

    async def _run(self, running: Running, prompt: str) -> None:
        if prompt.startswith("wait"):
            waits = [asyncio.create_task(event.wait()) for event in (self.go, running.cancelled)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not self.go.is_set():
                await self._end(running, FinishReason.CANCELLED)
                return
        if prompt.startswith("end "):
            await self._end(running, FinishReason(prompt.split()[1]), retry_after_s=41.0)
            return
        running.relegated = prompt == "relegate"
        service_class = ServiceClass.BEST_EFFORT if running.relegated else ServiceClass.STANDARD
        await self._bus.publish(
            running.stream_subject, Status(state="accepted", service_class=service_class, attempt=1)
        )
        if prompt == "break":
            await self._make(running, words(2))
            await self._end(running, FinishReason.FAILED)
        elif prompt == "hang":
            await self._make(running, words(1))
            await running.cancelled.wait()
            await self._end(running, FinishReason.CANCELLED)
        else:
            wanted = running.request.sampling.max_tokens
            if prompt == "flood":
                said = [FLOOD_WORD] * wanted
            elif prompt == "mute":
                said = [""] * wanted
            else:
                said = self.says[:wanted] or words(min(WORDS_LIMIT, wanted))
            await self._make(running, said)
            whole = said == self.says
            await self._end(running, FinishReason.STOP if whole else FinishReason.LENGTH)

    async def _make(self, running: Running, said: Sequence[str]) -> None:
        characters = 0
        for n, text in enumerate(said):
            running.words.append(text)
            last = FinishReason.LENGTH if n + 1 == running.request.sampling.max_tokens else None
            top = running.request.sampling.logprobs
            known = (
                []
                if top is None
                else [TokenLogprob(Likelihood(n, text.encode(), -0.5 - n), OTHERS[:top])]
            )
            delta = Delta(
                attempt=1,
                offset=n,
                tokens=[n],
                text=text,
                text_offset=characters,
                finish_reason=last,
                logprobs=known,
            )
            characters += len(text)
            await self._bus.publish(running.stream_subject, delta)
            if n % 64 == 63:
                await self._bus.flush(60.0)

    async def _end(
        self, running: Running, reason: FinishReason, retry_after_s: float | None = None
    ) -> None:
        running.verdict = made.verdict(
            finish_reason=reason,
            slo_met=not running.relegated,
            relegated=running.relegated,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=len(running.words),
            ended_unix_s=self._clock.unix_s(),
            retry_after_s=retry_after_s,
            thinking_tokens=1
            if running.words and running.request.slo is not None and running.request.slo.thinks
            else 0,
        )
        await self._bus.publish(running.stream_subject, End(verdict=running.verdict))


@contextlib.asynccontextmanager
async def standing_in(bus: Bus) -> AsyncIterator[StandIn]:
    """Serve on the bus from here to the end of the block."""
    async with asyncio.TaskGroup() as tasks:
        fleet = StandIn(bus, tasks)
        endpoints = [
            Endpoint(
                "requests", subjects.REQUESTS, GenerateRequest, fleet.on_request, queue="admission"
            ),
            Endpoint("attach", subjects.ATTACHES, Attach, fleet.on_attach, queue="admission"),
        ]
        service = await bus.serve("requests", endpoints, {})
        cancels = await bus.subscribe(subjects.CANCELS, Cancel, fleet.on_cancel)
        await fleet.digest()
        yield fleet
        fleet.go.set()
        for running in fleet.asked.values():
            running.cancelled.set()
        await service.stop()
        await cancels.stop()
