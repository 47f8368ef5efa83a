"""The frame of Anthropic's messages: a body with blocks of content, or a stream of events. It has
one choice, written as a chat, whose parts become blocks: thinking, text, and each use of a tool.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.api.api_format import ChoiceVerdict, Head, SoFar, Usage
from services.gateway.api.chats import CalledFunction, ChatChoice, ChatChunk
from services.gateway.http.envelope import Problem
from services.gateway.http.json_bytes import encode
from shared.errors import UNDECODABLE

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class TextBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # Anthropic's own, which proves where it comes from


class DirectCaller(Struct, frozen=True, kw_only=True):
    type: str = "direct"


class ToolUseBlock(Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller = DirectCaller()


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class MessagesUsage(Struct, frozen=True, kw_only=True):
    """`input_tokens`: those that were not in a prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | None = None
    cache_creation_input_tokens: int = 0
    cache_creation: None = None
    inference_geo: None = None
    server_tool_use: None = None
    service_tier: None = None  # Anthropic's names for its own; the answer has ours beside it


class MessageReply(Struct, frozen=True, kw_only=True):
    """A whole message. `service_tier` and `verdicts` are ours, as in chats."""

    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    usage: MessagesUsage
    service_tier: str
    type: str = "message"
    role: str = "assistant"
    stop_sequence: None = None
    stop_details: None = None
    container: None = None
    verdicts: Sequence[ChoiceVerdict] | UnsetType = UNSET


class MessagesError(Struct, frozen=True, kw_only=True):
    type: str
    message: str


class MessagesEnvelope(Struct, frozen=True, kw_only=True):
    error: MessagesError
    request_id: str
    type: str = "error"


def refusal(problem: Problem, request_id: str) -> bytes:
    """The body of a failure. Its message names the field at fault: it has no other place."""
    return encode(_envelope(problem, request_id))


def _envelope(problem: Problem, request_id: str) -> MessagesEnvelope:
    message = problem.message
    if problem.param and problem.param not in message:
        message = f"{problem.param}: {message}"
    kind = TYPE_OF_STATUS.get(problem.status, "invalid_request_error")
    return MessagesEnvelope(error=MessagesError(type=kind, message=message), request_id=request_id)


class MessagesFrame:
    """Implements Frame."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._blocks = 0  # begun so far
        self._open = ""  # the type of the block that is open
        self._called = False
        self._reason = ""  # why the choice ended

    def whole(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        (choice,) = choices
        assert isinstance(choice, ChatChoice)
        message, self._reason = choice.message, choice.finish_reason
        content: list[Block] = []
        if message.reasoning_content:
            content.append(ThinkingBlock(thinking=message.reasoning_content))
        if message.content:
            content.append(TextBlock(text=message.content))
        for call in message.tool_calls or ():
            self._called = True
            content.append(_use(call.id or "", call.function))
        return encode(self._reply(content, so_far))

    def refusal(self, problem: Problem) -> bytes:
        return refusal(problem, self._head.request_id)

    def chunks(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        return b"".join([self._chunk(choice, so_far) for choice in choices])

    def end(self, so_far: SoFar) -> bytes:
        reply = self._reply([], so_far)
        nothing = {"stop_sequence": None, "stop_details": None, "container": None}
        delta = {"stop_reason": reply.stop_reason, **nothing}
        told = {} if reply.verdicts is UNSET else {"verdicts": reply.verdicts}
        tier = reply.service_tier
        ended = _event("message_delta", delta=delta, usage=reply.usage, service_tier=tier, **told)
        return self._close() + ended + _event("message_stop")

    def failure(self, problem: Problem, so_far: SoFar) -> bytes:
        envelope = _envelope(problem, self._head.request_id)
        return _event("error", error=envelope.error, request_id=envelope.request_id)

    def _chunk(self, choice: Struct, so_far: SoFar) -> bytes:
        assert isinstance(choice, ChatChunk)
        delta, written = choice.delta, b""
        if delta.role:
            written += _event("message_start", message=self._reply([], so_far))
        if delta.reasoning_content:
            written += self._in(ThinkingBlock(thinking=""))
            written += self._more("thinking_delta", thinking=delta.reasoning_content)
        if delta.content:
            written += self._in(TextBlock(text=""))
            written += self._more("text_delta", text=delta.content)
        for part in delta.tool_calls or ():
            if part.id:
                self._called = True
                written += self._begin(_use(part.id, part.function))
            if part.function.arguments:
                written += self._more("input_json_delta", partial_json=part.function.arguments)
        if choice.finish_reason:
            self._reason = choice.finish_reason
        return written

    def _in(self, block: TextBlock | ThinkingBlock) -> bytes:
        """Begin the block, unless one of its type is open."""
        return b"" if self._open == type(block).__struct_config__.tag else self._begin(block)

    def _begin(self, block: Block) -> bytes:
        closed = self._close()
        self._open = str(type(block).__struct_config__.tag)
        self._blocks += 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _more(self, kind: str, **fields: str) -> bytes:
        delta = {"type": kind, **fields}
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> bytes:
        """End the block that is open, if one is."""
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._blocks - 1)

    def _reply(self, content: list[Block], so_far: SoFar) -> MessageReply:
        reason = REASONS.get(self._reason)
        if self._called and reason == "end_turn":  # of a named tool
            reason = "tool_use"
        return MessageReply(
            id=f"msg_{self._head.request_id}",
            model=so_far.model,
            content=content,
            stop_reason=reason,
            usage=_usage(so_far.usage),
            service_tier=so_far.service_tier,
            verdicts=so_far.told_verdicts,
        )


def _use(call_id: str, function: CalledFunction) -> ToolUseBlock:
    """A call. Arguments that are no whole object, as those of an answer cut off, are none."""
    try:
        given = msgspec.json.decode(function.arguments or b"{}")
    except UNDECODABLE:
        given = {}
    known = given if isinstance(given, dict) else {}
    return ToolUseBlock(id=call_id, name=function.name or "", input=known)


def _usage(usage: Usage) -> MessagesUsage:
    cached, thinking = usage.prompt_tokens_details.cached_tokens, usage.completion_tokens_details
    return MessagesUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokens(thinking_tokens=thinking.reasoning_tokens)
        if thinking
        else None,
    )


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"
