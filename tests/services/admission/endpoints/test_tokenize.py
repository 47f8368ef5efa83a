"""Tests of admission's tokenize endpoint: a tenant that fills its queue leaves room for others."""

import asyncio
import threading
from typing import Any

from services.admission.endpoints.tokenize import SMALLEST_BYTES, WAITING_BYTES, TokenizeEndpoint
from services.admission.tokenizers import Tokenizers
from services.admission.workers import Workers
from shared import subjects
from shared.clock import Clock
from shared.rules.rules import Rules
from shared.schemas import Refused, Tokenize, Tokenized
from shared.telemetry.instruments import Registry


class Asked:
    """A tenant's question, and the answer that it got."""

    headers: dict[str, str] = {}  # noqa: RUF012
    json, payload_bytes = False, SMALLEST_BYTES

    def __init__(self, tenant: str) -> None:
        self.subject = subjects.tokens(tenant)
        self.answer: Any = None

    async def reply(self, msg: Any) -> None:
        self.answer = msg


async def test_a_tenant_that_fills_the_room_leaves_others_theirs() -> None:
    desk, go_on = (
        TokenizeEndpoint(Tokenizers(), Workers(Clock(), 3.0, Registry()), Rules()),
        threading.Event(),
    )
    read = desk._read

    def waits(question: Any, tokenizer: Any) -> Any:
        go_on.wait(30.0)
        return read(question, tokenizer)

    desk._read = waits  # type: ignore[method-assign]
    room = WAITING_BYTES // SMALLEST_BYTES
    crowd = [Asked("a") for _ in range(2 * room)]
    other, question = Asked("b"), Tokenize(prompt="hi")
    try:
        async with asyncio.TaskGroup() as group:
            for call in [*crowd, other]:
                group.create_task(desk.answer(question, call))
            await asyncio.sleep(0.01)
            answers = [call.answer for call in crowd]
            assert [type(answer) for answer in answers] == [type(None)] * room + [Refused] * room
            assert other.answer is None
            go_on.set()
    finally:
        go_on.set()
    assert all(isinstance(call.answer, Tokenized) for call in [*crowd[:room], other])
    again = Asked("a")
    await desk.answer(question, again)
    assert isinstance(again.answer, Tokenized)
