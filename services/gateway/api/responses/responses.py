"""OpenAI's POST /v1/responses, read as a chat. A body that needs an earlier response is refused."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway.api import asking
from services.gateway.api.api_format import Frame, Head
from services.gateway.api.asking import Alternatives, AnyBody, ShortString, Tokens
from services.gateway.api.chats import ChatBody, ChatFormat
from services.gateway.api.formats import NamedSchema, ResponseFormat
from services.gateway.api.responses import items as response_items
from services.gateway.api.responses.frame import Echo, ResponseFrame
from services.gateway.api.tools.definitions import (
    TOOLS_LIMIT,
    Function,
    Named,
    NamedTool,
    Tool,
    ToolName,
)
from services.gateway.api.tools.hosted import without_hosted
from shared.errors import PeerError

LOGPROBS = "message.output_text.logprobs"
# the second one would be for reasoning that is not sent as it is
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
# parameters of the chat that a response is read as -> its own
PARAMS: Mapping[str, str] = MappingProxyType(
    {
        "messages": "input",
        "response_format": "text.format",
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "reasoning_effort": "reasoning.effort",
    }
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class FlatTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatNamed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: ToolName


class TextFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name`, `description` and `strict` only label a schema."""

    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | bool | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class Reasoning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    effort: Effort | None = None
    # without effect, for there are none
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None

    @property
    def summarised(self) -> bool:
        return bool(self.summary or self.generate_summary)


class ResponseStreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    # padding against eavesdroppers on packet sizes: accepted, and never sent
    include_obfuscation: bool | None = None


class ResponseBody(AnyBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    stream_options: ResponseStreamOptions | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatNamed | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Alternatives | None = None
    include: Annotated[list[ShortString], Meta(max_length=16)] | None = None
    prompt_cache_key: ShortString | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect:
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    prompt_cache_retention: ShortString | None = None
    safety_identifier: ShortString | None = None
    # Accepted with their neutral value only:
    background: bool | None = None
    context_management: Any = None
    conversation: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    store: bool | None = None
    truncation: str | None = None


_BODY = msgspec.json.Decoder(ResponseBody)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "truncation": (None, "disabled"),
}
IGNORABLE = {
    name: _NEUTRAL[name]
    for name in (
        "context_management", "max_tool_calls", "moderation", "prompt_cache_options", "truncation",
    )
} | {"store": (None, False)}  # fmt: skip


class AskedAsResponse(ChatBody, frozen=True, kw_only=True):
    """The chat that a response is read as. `hosted`: types of tools that are no functions."""

    origin: ResponseBody
    hosted: list[str]

    @property
    def ignored(self) -> list[str]:
        names = [f"tools.{kind}" for kind in self.hosted]
        names += [f"include.{one}" for one in self.origin.include or () if one not in INCLUDED]
        if self.origin.reasoning is not None and self.origin.reasoning.summarised:
            names.append("reasoning.summary")
        if self.origin.text is not None and self.origin.text.verbosity not in (None, "medium"):
            names.append("text.verbosity")
        return names

    def api_format(self, *, held: bool) -> "ResponsesFormat":
        return ResponsesFormat(self, held=held)


class ResponsesFormat(ChatFormat):
    """The responses API. Implements ApiFormat (services/gateway/api/api_format.py)."""

    operation = "responses"

    def __init__(self, body: AskedAsResponse, *, held: bool) -> None:
        super().__init__(body.calls, held=held, logprobs=bool(body.logprobs), token_ids=False)
        self._origin = body.origin

    def frame(self, head: Head) -> Frame:
        return ResponseFrame(head, _echo(self._origin))


def read_body(raw: bytes) -> AskedAsResponse:
    """Raises PeerError, naming the field where there is one."""
    raw, hosted = without_hosted(raw, ("function",))
    body = asking.read(_BODY, raw, _NEUTRAL)
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            raise PeerError(
                f"{name} is not supported, since no response is kept: send the earlier items in "
                "`input`",
                code="unsupported_parameter",
                param=name,
            )
    if body.store:
        raise PeerError(
            "store is not supported, except as false: no response is kept",
            code="unsupported_parameter",
            param="store",
        )
    return _as_chat(body, hosted)


def _as_chat(body: ResponseBody, hosted: list[str]) -> AskedAsResponse:
    form = body.text.format if body.text is not None else None
    logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not logprobs:
        raise PeerError(f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
    choice = body.tool_choice
    return AskedAsResponse(
        **{name: getattr(body, name) for name in AnyBody.__struct_fields__},
        origin=body,
        hosted=hosted,
        messages=response_items.messages_of(body.input, body.instructions),
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(tool) for tool in body.tools],
        tool_choice=NamedTool(function=Named(name=choice.name), type="function")
        if isinstance(choice, FlatNamed)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=None if form is None else _format(form),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        prompt_cache_key=body.prompt_cache_key,
    )


def _tool(tool: FlatTool) -> Tool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(function=function, type="function")


def _format(form: TextFormat) -> ResponseFormat:
    schema = NamedSchema(schema=form.schema) if form.type == "json_schema" else None
    return ResponseFormat(type=form.type, json_schema=schema)


def _echo(body: ResponseBody) -> Echo:
    form = (body.text.format if body.text else None) or TextFormat(type="text")
    return Echo(
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=Reasoning(effort=body.reasoning.effort if body.reasoning else None),
        temperature=1.0 if body.temperature is None else body.temperature,
        text={"format": form},
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        user=body.user,
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
    )
