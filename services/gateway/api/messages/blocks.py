"""Reads the messages of Anthropic's API, whose contents are blocks, as the messages of a chat."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, assert_never

import msgspec
from msgspec import Struct

from services.gateway.api.asking import UNSUPPORTED
from shared.errors import PeerError
from shared.text.chat_prompt import ONLY_TEXT

Blocks = str | list[dict[str, Any]]


class Turn(Struct, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class Text(Struct, frozen=True, kw_only=True):
    text: str


class Thinking(Struct, frozen=True, kw_only=True):
    thinking: str


class Redacted(Struct, frozen=True, kw_only=True):
    """Thinking that only Anthropic can read."""


class ToolUse(Struct, frozen=True, kw_only=True):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Struct, frozen=True, kw_only=True):
    tool_use_id: str
    content: Blocks = ""


Block = Text | Thinking | Redacted | ToolUse | ToolResult
KINDS: Mapping[str, type[Block]] = {
    "text": Text,
    "thinking": Thinking,
    "redacted_thinking": Redacted,
    "tool_use": ToolUse,
    "tool_result": ToolResult,
}


def messages_of(turns: list[Turn], system: Blocks | None) -> list[dict[str, Any]]:
    """The messages of the chat. Raises PeerError, naming the block."""
    if not turns:
        raise PeerError("messages is empty", param="messages")
    if turns[-1].role == "assistant":
        raise PeerError(
            "the last message is the assistant's: an answer cannot be begun for the model",
            code=UNSUPPORTED,
            param="messages",
        )
    messages: list[dict[str, Any]] = []
    if system:
        messages.append({"role": "system", "content": _text(system, "system")})
    for at, turn in enumerate(turns):
        messages += _messages(turn, f"messages[{at}].content")
    return messages


def _messages(turn: Turn, place: str) -> list[dict[str, Any]]:
    """A turn as messages: each result of a tool is one, and so is all the rest together."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results: list[dict[str, Any]] = []
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, where in _blocks(turn.content, place):
        match block:
            case Text(text=text):
                texts.append(text)
            case Thinking(thinking=thinking):
                thoughts.append(thinking)
            case Redacted():
                pass
            case ToolUse(id=call_id, name=name, input=arguments):
                function = {"name": name, "arguments": msgspec.json.encode(arguments).decode()}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ToolResult(tool_use_id=call_id, content=content):
                said = _text(content, f"{where}.content")
                results.append({"role": "tool", "tool_call_id": call_id, "content": said})
            case _:
                assert_never(block)
    if results and not texts:
        return results
    message: dict[str, Any] = {"role": turn.role, "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _text(content: Blocks, place: str) -> str:
    """The text of a content that is nothing else."""
    if isinstance(content, str):
        return content
    texts = list[str]()
    for block, where in _blocks(content, place):
        if not isinstance(block, Text):
            raise PeerError(f"{where}: {ONLY_TEXT}", code=UNSUPPORTED, param=where)
        texts.append(block.text)
    return "".join(texts)


def _blocks(content: list[dict[str, Any]], place: str) -> Iterable[tuple[Block, str]]:
    """The blocks of a content, each with its place. All else that one has only labels it."""
    for at, raw in enumerate(content):
        where = f"{place}[{at}]"
        name = raw.get("type")
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            message = f"{where} is of the type {str(name)[:64]!r}: {ONLY_TEXT}"
            raise PeerError(message, code=UNSUPPORTED, param=where)
        try:
            yield msgspec.convert(raw, kind), where
        except msgspec.ValidationError as wrong:
            raise PeerError(f"{where}: {str(wrong)[:300]}", param=where) from None
