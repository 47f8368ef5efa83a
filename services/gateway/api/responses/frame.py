"""Writes answers of OpenAI's Responses API (/v1/responses), whole or as a stream of numbered
events. An answer has one choice, written as a chat: its thinking, its texts (type `message`) and
each of its calls become items.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from services.gateway.api.api_format import ChoiceVerdict, Head, SoFar, Usage
from services.gateway.api.chats import ChatChoice, ChatChunk
from services.gateway.api.logprobs import ChatLogprobs, ContentLogprob
from services.gateway.http.envelope import Problem
from services.gateway.http.json_bytes import encode

INCOMPLETE = {"length": "max_output_tokens"}  # reason of a choice -> of a response
# the codes of errors that a response may have, by HTTP's status
ERROR_CODES = {429: "rate_limit_exceeded"}


class OutputText(Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[str] = []
    logprobs: list[ContentLogprob] = []


class MessageItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class CallItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str  # JSON
    status: str


class ReasoningText(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[str] = []  # always empty


Item = ReasoningItem | MessageItem | CallItem


class InputDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int


class OutputDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct, frozen=True, kw_only=True):
    code: str
    message: str


class Incomplete(Struct, frozen=True, kw_only=True):
    reason: str


class Echo(Struct, frozen=True, kw_only=True):
    """The part of a response that repeats its request."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: Struct
    temperature: float
    text: Mapping[str, Struct]
    tool_choice: str | Struct
    tools: Sequence[Struct]
    top_logprobs: int
    top_p: float
    user: str | None
    prompt_cache_key: str | None
    safety_identifier: str | None
    background: bool = False
    frequency_penalty: float = 0.0
    max_tool_calls: None = None
    presence_penalty: float = 0.0
    previous_response_id: None = None
    store: bool = False
    truncation: str = "disabled"


class ResponseReply(Echo, frozen=True, kw_only=True):
    """A whole response."""

    id: str
    created_at: int  # unix seconds
    completed_at: int | None  # unix seconds; None: it is not complete
    model: str
    status: str
    output: Sequence[Item]
    service_tier: str
    usage: ResponseUsage | None
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    object: str = "response"
    verdicts: Sequence[ChoiceVerdict] | UnsetType = UNSET


class _Text:
    """An item that is a text, as far as it is written."""

    prefix, events = "msg", "response.output_text"

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self.texts: list[str] = []
        self.logprobs: list[ContentLogprob] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def item(self, status: str) -> MessageItem | ReasoningItem:
        return MessageItem(id=self.id, status=status, content=[self._part()])

    def begun(self) -> MessageItem | ReasoningItem:
        return MessageItem(id=self.id, status="in_progress", content=[])

    def part(self) -> OutputText | ReasoningText:
        return self._part()

    def more(self, logprobs: list[ContentLogprob]) -> dict[str, Any]:
        """The fields of an event beside its text."""
        return {"logprobs": logprobs}

    def _part(self) -> OutputText:
        return OutputText(text=self.text, logprobs=list(self.logprobs))


class _Thinking(_Text):
    """An item that is thinking, as far as it is written."""

    prefix, events = "rs", "response.reasoning_text"

    def item(self, status: str) -> ReasoningItem:
        content = [ReasoningText(text=self.text)]
        return ReasoningItem(id=self.id, status=status, content=content)

    def begun(self) -> ReasoningItem:
        return ReasoningItem(id=self.id, status="in_progress", content=[])

    def part(self) -> ReasoningText:
        return ReasoningText(text=self.text)

    def more(self, logprobs: list[ContentLogprob]) -> dict[str, Any]:
        return {}


class _Call:
    """An item that is a call, as far as it is written."""

    def __init__(self, item_id: str, call_id: str, name: str) -> None:
        self.id, self.call_id, self.name = item_id, call_id, name
        self.arguments: list[str] = []

    def item(self, status: str) -> CallItem:
        return CallItem(
            id=self.id,
            call_id=self.call_id,
            name=self.name,
            arguments="".join(self.arguments),
            status=status,
        )


class ResponseFrame:
    """Implements Frame (services/gateway/api/api_format.py): writes an answer around its choice."""

    def __init__(self, head: Head, echo: Echo) -> None:
        self._head = head
        self._echo = {name: getattr(echo, name) for name in echo.__struct_fields__}
        self._number = 0  # of the next event
        self._output: list[Item] = []  # items that are whole
        self._open: _Text | _Call | None = None
        self._reason = ""  # why the choice ended

    def whole(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        (choice,) = choices
        assert isinstance(choice, ChatChoice)
        message, self._reason = choice.message, choice.finish_reason
        calls = message.tool_calls or []
        if message.reasoning_content:
            thinking = _Thinking(self._item_id("rs"))
            thinking.texts = [message.reasoning_content]
            self._output.append(thinking.item("completed"))
        if message.content or not calls:
            text = _Text(self._item_id("msg"))
            text.texts, text.logprobs = [message.content or ""], _likely(choice.logprobs)
            self._output.append(text.item(self._status if not calls else "completed"))
        for call in calls:
            function = call.function
            made = _Call(self._item_id("fc"), call.id or "", function.name or "")
            made.arguments = [function.arguments]
            last = call is calls[-1]
            self._output.append(made.item(self._status if last else "completed"))
        return encode(self._reply(self._status, so_far))

    def refusal(self, problem: Problem) -> bytes:
        return problem.body()

    def chunks(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        return b"".join([self._chunk(choice, so_far) for choice in choices])

    def end(self, so_far: SoFar) -> bytes:
        empty = b"" if self._output or self._open else self._begin_text(_Text)
        kind = f"response.{self._status}"
        written = empty + self._close(self._status)
        return written + self._event(kind, response=self._reply(self._status, so_far))

    def failure(self, problem: Problem, so_far: SoFar) -> bytes:
        error = ResponseError(
            code=ERROR_CODES.get(problem.status, "server_error"), message=problem.message
        )
        written = self._close("incomplete")
        reply = self._reply("failed", so_far, error)
        return written + self._event("response.failed", response=reply)

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason in INCOMPLETE else "completed"

    def _chunk(self, choice: Struct, so_far: SoFar) -> bytes:
        assert isinstance(choice, ChatChunk)
        delta, written = choice.delta, b""
        if delta.role:
            for kind in ("response.created", "response.in_progress"):
                written += self._event(kind, response=self._reply("in_progress", so_far))
        if delta.reasoning_content:
            written += self._say(_Thinking, delta.reasoning_content, [])
        if delta.content:
            written += self._say(_Text, delta.content, _likely(choice.logprobs))
        for part in delta.tool_calls or ():
            if part.id:
                written += self._begin_call(part.id, part.function.name or "")
            if part.function.arguments:
                written += self._argue(part.function.arguments)
        if choice.finish_reason:
            self._reason = choice.finish_reason
        return written

    def _begin_text(self, kind: type[_Text]) -> bytes:
        closed = self._close("completed")
        self._open = text = kind(self._item_id(kind.prefix))
        return (
            closed
            + self._event("response.output_item.added", item=text.begun())
            + self._event(
                "response.content_part.added", item_id=text.id, content_index=0, part=text.part()
            )
        )

    def _say(self, kind: type[_Text], text: str, logprobs: list[ContentLogprob]) -> bytes:
        begun = b"" if type(self._open) is kind else self._begin_text(kind)
        assert isinstance(self._open, _Text)
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        return begun + self._event(
            f"{kind.events}.delta",
            item_id=self._open.id,
            content_index=0,
            delta=text,
            **self._open.more(logprobs),
        )

    def _begin_call(self, call_id: str, name: str) -> bytes:
        closed = self._close("completed")
        self._open = call = _Call(self._item_id("fc"), call_id, name)
        return closed + self._event("response.output_item.added", item=call.item("in_progress"))

    def _argue(self, arguments: str) -> bytes:
        assert isinstance(self._open, _Call)
        self._open.arguments.append(arguments)
        return self._event(
            "response.function_call_arguments.delta", item_id=self._open.id, delta=arguments
        )

    def _close(self, status: str) -> bytes:
        """End the item that is open, if one is."""
        match self._open:
            case None:
                return b""
            case _Text() as text:
                written = self._event(
                    f"{text.events}.done",
                    item_id=text.id,
                    content_index=0,
                    text=text.text,
                    **text.more(text.logprobs),
                ) + self._event(
                    "response.content_part.done", item_id=text.id, content_index=0, part=text.part()
                )
            case _Call() as call:
                written = self._event(
                    "response.function_call_arguments.done",
                    item_id=call.id,
                    name=call.name,
                    arguments="".join(call.arguments),
                )
        item = self._open.item(status)
        written += self._event("response.output_item.done", item=item)
        self._output.append(item)
        self._open = None
        return written

    def _event(self, kind: str, **fields: Any) -> bytes:
        """One event. It names the item that is open, unless it is about the response itself."""
        event: dict[str, Any] = {"type": kind, "sequence_number": self._number, **fields}
        if "response" not in fields:
            event["output_index"] = len(self._output)
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(event) + b"\n\n"

    def _item_id(self, prefix: str) -> str:
        number = len(self._output)
        digest = sha256(f"{self._head.request_id}.item.{number}".encode()).hexdigest()
        return f"{prefix}_{digest[:48]}"

    def _reply(
        self, status: str, so_far: SoFar, error: ResponseError | None = None
    ) -> ResponseReply:
        over = status != "in_progress"
        reason = INCOMPLETE.get(self._reason) if status == "incomplete" else None
        return ResponseReply(
            **self._echo,
            id=f"resp_{self._head.request_id}",
            created_at=self._head.created,
            completed_at=so_far.ended_unix_s if status == "completed" else None,
            model=so_far.model,
            status=status,
            output=list(self._output),
            service_tier=so_far.service_tier,
            usage=_usage(so_far.usage) if over else None,
            error=error,
            incomplete_details=Incomplete(reason=reason) if reason else None,
            verdicts=so_far.told_verdicts,
        )


def _likely(logprobs: ChatLogprobs | None) -> list[ContentLogprob]:
    return logprobs.content if logprobs is not None else []


def _usage(usage: Usage) -> ResponseUsage:
    thinking = usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(
            reasoning_tokens=thinking.reasoning_tokens if thinking else 0
        ),
        total_tokens=usage.total_tokens,
    )
