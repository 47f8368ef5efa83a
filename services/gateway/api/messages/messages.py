"""Anthropic's POST /v1/messages and /v1/messages/count_tokens, read as a chat."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.gateway.api import asking
from services.gateway.api.api_format import Frame, Head
from services.gateway.api.asking import AnyBody, StopString, Tokens
from services.gateway.api.chats import ChatBody, ChatFormat
from services.gateway.api.formats import NamedSchema, ResponseFormat
from services.gateway.api.messages import blocks
from services.gateway.api.messages.blocks import Blocks, Turn
from services.gateway.api.messages.frame import MessagesFrame
from services.gateway.api.tools.definitions import (
    TOOLS_LIMIT,
    Function,
    Named,
    NamedTool,
    Tool,
    ToolChoice,
    ToolName,
)
from services.gateway.api.tools.hosted import without_hosted
from shared.errors import PeerError

# parameters of the chat that a message is read as -> its own
PARAMS: Mapping[str, str] = MappingProxyType(
    {"response_format": "output_config.format", "stop": "stop_sequences"}
)
USER_LIMIT = 128  # characters: agents have the session at the end of a longer one
STANDARD = "standard_only"  # the service tier of an account without a commitment
CALLERS = (None, "custom")  # types of tools that the caller runs


class ClientTool(Struct, frozen=True, kw_only=True):
    """A function to call. All else that it has (cache_control, strict, ...) only labels it."""

    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None


class Choice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The wish to think, for the model's template. How long and how it is shown has no effect."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user_id: Annotated[str, Meta(max_length=512)] | None = None  # names a session, as `user` does


class CountBody(AnyBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[Turn]
    system: Blocks | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = None  # without effect


class MessagesBody(CountBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: Tokens
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None


class AskedAsMessages(ChatBody, frozen=True, kw_only=True):
    """The chat that messages are read as. `hosted`: types of tools that Anthropic would run."""

    hosted: list[str]
    budget: bool  # it names how long the model may think

    @property
    def ignored(self) -> list[str]:
        names = [f"tools.{kind}" for kind in self.hosted]
        return [*names, "thinking.budget_tokens"] if self.budget else names

    def api_format(self, *, held: bool) -> "MessagesFormat":
        return MessagesFormat(self.calls, held=held, logprobs=False, token_ids=False)


class MessagesFormat(ChatFormat):
    """The messages API: a chat in another frame. Implements ApiFormat."""

    operation = "messages"

    def frame(self, head: Head) -> Frame:
        return MessagesFrame(head)


_BODY = msgspec.json.Decoder(MessagesBody)
_COUNT = msgspec.json.Decoder(CountBody)


def read_body(raw: bytes) -> AskedAsMessages:
    """Raises PeerError, naming the field where there is one."""
    raw, hosted = without_hosted(raw, CALLERS)
    body = asking.read(_BODY, raw, {})
    user = body.user or (body.metadata and body.metadata.user_id) or ""
    return msgspec.structs.replace(
        _as_chat(body, hosted),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or body.stop,
        user=user[-USER_LIMIT:],
    )


def read_count(raw: bytes) -> AskedAsMessages:
    """The messages whose tokens are to be counted. Raises PeerError."""
    raw, hosted = without_hosted(raw, CALLERS)
    return _as_chat(asking.read(_COUNT, raw, {}), hosted)


def _as_chat(body: CountBody, hosted: list[str]) -> AskedAsMessages:
    config, thinking = body.output_config or OutputConfig(), body.thinking
    thinks = {} if thinking is None else {"enable_thinking": thinking.type != "disabled"}
    same = {name: getattr(body, name) for name in AnyBody.__struct_fields__}
    if body.service_tier == STANDARD:
        same["service_tier"] = None
    return AskedAsMessages(
        **same,
        hosted=hosted,
        budget=thinking is not None and thinking.budget_tokens is not None,
        messages=blocks.messages_of(body.messages, body.system),
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=None if body.tool_choice is None else _choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        response_format=None if config.format is None else _format(config.format),
        reasoning_effort="xhigh" if config.effort == "max" else config.effort,
        chat_template_kwargs=thinks | (body.chat_template_kwargs or {}),
    )


def _tool(tool: ClientTool) -> Tool:
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema)
    return Tool(function=function, type="function")


def _choice(choice: Choice) -> ToolChoice:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            if choice.name is None:
                raise PeerError("tool_choice of the type tool needs a name", param="tool_choice")
            return NamedTool(function=Named(name=choice.name), type="function")
        case "auto" | "none" as same:
            return same


def _format(form: JsonFormat) -> ResponseFormat:
    return ResponseFormat(type="json_schema", json_schema=NamedSchema(schema=form.schema))
