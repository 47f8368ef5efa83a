"""Structured output: a struct for each format. Only an engine's compiler knows what it takes."""

from typing import Annotated

from msgspec import Meta, Struct

SCHEMA_LIMIT = 65_536  # characters; compiling one takes milliseconds for each thousand
EXPRESSION_LIMIT = 8192

SchemaText = Annotated[str, Meta(min_length=1, max_length=SCHEMA_LIMIT)]
ExpressionText = Annotated[str, Meta(min_length=1, max_length=EXPRESSION_LIMIT)]
ChoiceText = Annotated[str, Meta(min_length=1, max_length=1024)]
Choices = Annotated[list[ChoiceText], Meta(min_length=1, max_length=256)]


class JsonSchema(Struct, frozen=True, kw_only=True, tag="json_schema", forbid_unknown_fields=True):
    """The output is JSON that fits `schema`, itself a JSON text."""

    schema: SchemaText


class JsonObject(Struct, frozen=True, kw_only=True, tag="json_object", forbid_unknown_fields=True):
    """The output is any JSON object."""


class Regex(Struct, frozen=True, kw_only=True, tag="regex", forbid_unknown_fields=True):
    """The whole output matches a regular expression."""

    pattern: ExpressionText


class Choice(Struct, frozen=True, kw_only=True, tag="choice", forbid_unknown_fields=True):
    """The output is one of these texts."""

    options: Choices


class Grammar(Struct, frozen=True, kw_only=True, tag="grammar", forbid_unknown_fields=True):
    """The output follows a grammar in EBNF, in the dialect of the engine's compiler."""

    ebnf: SchemaText


Structured = JsonSchema | JsonObject | Regex | Choice | Grammar
