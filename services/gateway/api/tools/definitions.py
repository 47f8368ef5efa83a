"""Reads the tools of a chat request, and the choice among them, into Calls: the calls that the
answer may hold, and the format of a required one.
"""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from shared.errors import PeerError
from shared.structured import SCHEMA_LIMIT, JsonSchema, Structured

ToolName = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.:/-]+$")]
TOOLS_LIMIT = 128
# of a function that names no parameters
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
DEFINITIONS = "$defs"


class Function(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function to call. `strict` only labels it: a required call is held to its schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: Function
    type: Literal["function"]


class Named(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: ToolName


class NamedTool(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    function: Named
    type: Literal["function"]


Tools = Annotated[list[Tool], Meta(max_length=TOOLS_LIMIT)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Calls(NamedTuple):
    """The calls that an answer may hold."""

    tools: list[Function]
    required: bool  # it must call one
    name: str  # the one that it must call; empty: any
    parallel: bool  # it may call several

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools)

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's form."""
        return [{"type": "function", "function": msgspec.to_builtins(tool)} for tool in self.tools]

    @property
    def structured(self) -> Structured | None:
        """The format of a required call: the arguments of the named tool, or a list of calls; else
        None. Raises PeerError for two tools whose schemas define one name differently.
        """
        if not self.required:
            return None
        if self.name:
            (tool,) = (tool for tool in self.tools if tool.name == self.name)
            return JsonSchema(schema=_text(tool.parameters or NO_ARGUMENTS))
        shared: dict[str, Any] = {}
        calls = []
        for tool in self.tools:
            parameters = dict(tool.parameters or NO_ARGUMENTS)
            for name, value in parameters.pop(DEFINITIONS, {}).items():
                if shared.setdefault(name, value) != value:
                    raise PeerError(
                        f"two tools define {DEFINITIONS}.{name} differently", param="tools"
                    )
            calls.append(_object({"name": {"const": tool.name}, "arguments": parameters}))
        most = {} if self.parallel else {"maxItems": 1}
        calls_of = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}
        return JsonSchema(schema=_text(calls_of | ({DEFINITIONS: shared} if shared else {})))


def read(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Calls | None:
    """The calls that the answer may hold; None for none. Raises PeerError, naming the field."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise PeerError("tool_choice needs tools", param="tool_choice")
        return None
    functions = [tool.function for tool in tools]
    names = {function.name for function in functions}
    if len(names) < len(functions):
        raise PeerError("two tools have the same name", param="tools")
    if choice == "none":
        return None
    name = choice.function.name if isinstance(choice, NamedTool) else ""
    if name and name not in names:
        raise PeerError(f"tool_choice names {name!r}, which is not in tools", param="tool_choice")
    required = bool(name) or choice == "required"
    return Calls(functions, required, name, parallel is not False)


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(schema: dict[str, Any]) -> str:
    text = msgspec.json.encode(schema).decode()
    if len(text) > SCHEMA_LIMIT:
        raise PeerError(
            f"the schemas of the tools have {len(text)} characters, more than {SCHEMA_LIMIT}",
            param="tools",
        )
    return text
