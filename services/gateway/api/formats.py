"""Reads the format of an answer: OpenAI's `response_format`, or vLLM's `structured_outputs`."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shared.errors import PeerError
from shared.structured import (
    Choice,
    Choices,
    ExpressionText,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    SchemaText,
    Structured,
)


class NamedSchema(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A schema. The other fields only label it: the answer is always held to the schema."""

    schema: dict[str, Any] | bool | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form. Exactly one field is set."""

    json: dict[str, Any] | SchemaText | None = None
    json_object: bool | None = None
    regex: ExpressionText | None = None
    choice: Choices | None = None
    grammar: SchemaText | None = None


def wanted(
    response_format: ResponseFormat | None, outputs: StructuredOutputs | None
) -> Structured | None:
    """The format; None: free text. PeerError: it is unknown, has no schema, or there are two."""
    if response_format is None or response_format.type == "text":
        return None if outputs is None else _of_vllm(outputs)
    if outputs is not None:
        raise PeerError(
            "give one of response_format and structured_outputs", param="structured_outputs"
        )
    if response_format.type == "json_object":
        return JsonObject()
    if response_format.json_schema is None or response_format.json_schema.schema is UNSET:
        raise PeerError(
            "response_format of type json_schema needs json_schema.schema", param="response_format"
        )
    return _schema(response_format.json_schema.schema, "response_format")


def _of_vllm(outputs: StructuredOutputs) -> Structured:
    found: list[Structured] = []
    if outputs.json is not None:
        found.append(_schema(outputs.json, "structured_outputs"))
    if outputs.json_object:
        found.append(JsonObject())
    if outputs.regex is not None:
        found.append(Regex(pattern=outputs.regex))
    if outputs.choice is not None:
        found.append(Choice(options=outputs.choice))
    if outputs.grammar is not None:
        found.append(Grammar(ebnf=outputs.grammar))
    if len(found) != 1:
        raise PeerError(
            "structured_outputs takes exactly one of json, json_object, regex, choice and grammar",
            param="structured_outputs",
        )
    return found[0]


def _schema(schema: Any, param: str) -> JsonSchema:
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    try:
        return msgspec.convert({"type": "json_schema", "schema": text}, JsonSchema)
    except msgspec.ValidationError as wrong:
        raise PeerError(f"the schema is too long: {wrong}", param=param) from None
