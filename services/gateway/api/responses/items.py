"""Reads the input of OpenAI's responses API as the messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.errors import PeerError
from shared.text.chat_prompt import ONLY_TEXT

TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text", "refusal")
CallId = Annotated[str, Meta(min_length=1, max_length=128)]
Role = Literal["user", "assistant", "system", "developer"]


class Part(Struct, frozen=True, kw_only=True):
    """A part of a content. All else that it has (annotations, ...) only labels the text."""

    type: str
    text: str = ""
    refusal: str = ""


class MessageItem(Struct, frozen=True, kw_only=True):
    role: Role
    content: str | list[Part]


class ReasoningItem(Struct, frozen=True, kw_only=True):
    content: list[Part] | None = None


class CallItem(Struct, frozen=True, kw_only=True):
    call_id: CallId
    name: str
    arguments: str


class ResultItem(Struct, frozen=True, kw_only=True):
    call_id: CallId
    output: str | list[Part]


Item = MessageItem | ReasoningItem | CallItem | ResultItem
KINDS: dict[str, type[Item]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
}


# the fields of a message of which only the thinking has come
THOUGHT = {"role", "content", "reasoning_content"}


def messages_of(
    given: str | list[dict[str, Any]], instructions: str | None
) -> list[dict[str, Any]]:
    """The messages; instructions come first, as a system message. Calls that follow one another, or
    a message of the assistant, are calls of one message. Raises PeerError, naming the item.
    """
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*first, {"role": "user", "content": given}]
    if not given:
        raise PeerError("input is empty", param="input")
    messages: list[dict[str, Any]] = list(first)
    for at, raw in enumerate(given):
        _add(messages, _read(raw, f"input[{at}]"), f"input[{at}]")
    return messages


def _read(raw: dict[str, Any], param: str) -> Item:
    kind = raw.get("type", "message")
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise PeerError(
            f"{param} has a type that is not supported; supported are {known}",
            code="unsupported_parameter",
            param=param,
        )
    try:
        return msgspec.convert(raw, KINDS[kind])
    except msgspec.ValidationError as wrong:
        raise PeerError(f"{param}: {str(wrong)[:300]}", param=param) from None


def _add(messages: list[dict[str, Any]], item: Item, param: str) -> None:
    match item:
        case MessageItem(role=role, content=content):
            message = {"role": role, "content": _text(content, param)}
            if role == "assistant" and messages and messages[-1].keys() == THOUGHT:
                messages[-1].update(message)
            else:
                messages.append(message)
        case ReasoningItem(content=content):
            thought = _text(content or [], param)
            if thought:
                blank: dict[str, Any] = {"role": "assistant", "content": None}
                messages.append(blank | {"reasoning_content": thought})
        case ResultItem(call_id=call_id, output=output):
            result = {"role": "tool", "tool_call_id": call_id, "content": _text(output, param)}
            messages.append(result)
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            call = {
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: str | Sequence[Part], param: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.type not in TEXT_PARTS:
            raise PeerError(
                f"{param} has a part of the type {part.type[:64]!r}: {ONLY_TEXT}",
                code="unsupported_parameter",
                param=param,
            )
    return "".join(part.refusal or part.text for part in content)
