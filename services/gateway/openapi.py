"""Makes GET /openapi.json from the structs that bodies are read into and answers written from."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from services.gateway.api.alive import Model, ModelList
from services.gateway.api.api_format import Reply
from services.gateway.api.chats import ChatBody, ChatChoice
from services.gateway.api.completions import CompletionBody, CompletionChoice
from services.gateway.api.messages.frame import MessageReply, MessagesEnvelope
from services.gateway.api.messages.messages import CountBody, MessagesBody
from services.gateway.api.responses.frame import ResponseReply
from services.gateway.api.responses.responses import (
    FlatNamed,
    FlatTool,
    Reasoning,
    ResponseBody,
    TextFormat,
)
from services.gateway.api.texts import (
    CountReply,
    DetokenizeBody,
    DetokenizeReply,
    TokenizeBody,
    TokenizeReply,
)
from services.gateway.batches.endpoints import BatchBody
from services.gateway.batches.file_store import FileObject
from services.gateway.batches.files import Deleted, Page
from services.gateway.batches.record import Batch
from services.gateway.http import headers as request_headers
from services.gateway.http import slo_headers
from services.gateway.http.envelope import Envelope
from services.gateway.http.guard import ANTHROPIC_KEY, TENANT

JSON, EVENTS = "application/json", "text/event-stream"
TEXT, FORM = "text/plain", "multipart/form-data"
BYTES = "application/octet-stream"
REF = "#/components/schemas/{name}"


class ChatReply(Reply, frozen=True, kw_only=True):
    choices: Sequence[ChatChoice]


class CompletionReply(Reply, frozen=True, kw_only=True):
    choices: Sequence[CompletionChoice]


class Response(ResponseReply, frozen=True, kw_only=True):
    reasoning: Reasoning
    text: dict[str, TextFormat]
    tool_choice: str | FlatNamed
    tools: Sequence[FlatTool]


class FilePage(Page, frozen=True, kw_only=True):
    data: list[FileObject]


class BatchPage(Page, frozen=True, kw_only=True):
    data: list[Batch]


class Told(Struct, frozen=True, kw_only=True):
    """The answer of /ready: the gateway serves, or it says why not."""

    ready: bool
    reason: str


class Version(Struct, frozen=True, kw_only=True):
    version: str


class Health(Struct, frozen=True, kw_only=True):
    status: str


class Operation(NamedTuple):
    summary: str
    reply: type[Struct] | None = None  # None: no JSON
    body: type[Struct] | None = None
    form: bool = False
    media_type: str = JSON
    streams: bool = False
    failure: type[Struct] = Envelope
    asks: bool = False  # it takes the headers of a request to a model
    query: Sequence[str] = ()


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "OpenAI's chat completions", ChatReply, ChatBody, streams=True, asks=True
    ),
    ("POST", "/v1/completions"): Operation(
        "OpenAI's completions", CompletionReply, CompletionBody, streams=True, asks=True
    ),
    ("POST", "/v1/responses"): Operation(
        "OpenAI's responses", Response, ResponseBody, streams=True, asks=True
    ),
    ("POST", "/v1/messages"): Operation(
        "Anthropic's messages",
        MessageReply,
        MessagesBody,
        streams=True,
        failure=MessagesEnvelope,
        asks=True,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "The tokens of messages", CountReply, CountBody, failure=MessagesEnvelope
    ),
    ("POST", "/tokenize"): Operation("The tokens of a text", TokenizeReply, TokenizeBody),
    ("POST", "/detokenize"): Operation("The text of tokens", DetokenizeReply, DetokenizeBody),
    ("POST", "/v1/files"): Operation("Store the file of a batch", FileObject, form=True),
    ("GET", "/v1/files"): Operation(
        "Files, the newest first", FilePage, query=("after", "limit", "order", "purpose")
    ),
    ("GET", "/v1/files/{file_id}"): Operation("One file", FileObject),
    ("DELETE", "/v1/files/{file_id}"): Operation("Delete a file", Deleted),
    ("GET", "/v1/files/{file_id}/content"): Operation("The bytes of a file", media_type=BYTES),
    ("POST", "/v1/batches"): Operation("Begin a batch", Batch, BatchBody),
    ("GET", "/v1/batches"): Operation(
        "Batches, the newest first", BatchPage, query=("after", "limit")
    ),
    ("GET", "/v1/batches/{batch_id}"): Operation("One batch", Batch),
    ("POST", "/v1/batches/{batch_id}/cancel"): Operation("Cancel a batch", Batch),
    ("GET", "/v1/models"): Operation("Models and adapters", ModelList),
    ("GET", "/v1/models/{model}"): Operation("One model", Model),
    ("GET", "/version"): Operation("The version of Slackline", Version),
    ("GET", "/health"): Operation("200 while the process lives", Health),
    ("GET", "/ready"): Operation("200 while requests can be served", Told),
    ("GET", "/metrics"): Operation("Prometheus text format", media_type=TEXT),
    ("GET", "/openapi.json"): Operation("This document", media_type=JSON),
}
NUMBERS = {"limit": {"type": "integer", "minimum": 1, "maximum": 100}}
MILLISECONDS = {"type": "number", "minimum": slo_headers.LEAST_MS, "maximum": slo_headers.MOST_MS}
PLAIN = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"}
HEADERS: Mapping[str, Mapping[str, Any]] = {
    request_headers.IDEMPOTENCY_KEY: PLAIN,
    request_headers.CORRELATION_ID: {"type": "string", "maxLength": 256},
    **{name: {"type": "string", "maxLength": 64} for name in request_headers.TIER_HEADERS},
    **{name: MILLISECONDS for names in slo_headers.SLO_HEADERS.values() for name in names},
    request_headers.ALLOW_RELEGATION: {"enum": ["true", "false"]},
    request_headers.LENIENT: {"enum": ["true", "false"]},
    request_headers.VERDICT: {"enum": ["true", "false"]},
    request_headers.APPLICATION: {"type": "string"},
    TENANT: PLAIN,
}
FORM_SCHEMA = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"const": "batch"},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["file", "purpose"],
    "additionalProperties": False,
}


@cache
def document() -> bytes:
    """The document, as JSON."""
    kinds: set[type[Struct]] = {
        kind
        for op in OPERATIONS.values()
        for kind in (op.body, op.reply, op.failure)
        if kind is not None
    }
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    refs, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schemas = dict(zip(ordered, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, schemas)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Slackline",
                "version": version("slackline"),
                "description": "OpenAI's API with an SLO for each request; docs/http.md has all.",
            },
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "anthropic": {"type": "apiKey", "in": "header", "name": ANTHROPIC_KEY},
                },
            },
            # without keys of its own the gateway takes any, or none
            "security": [{"key": []}, {"anthropic": []}, {}],
        }
    )


def _operation(
    method: str, path: str, operation: Operation, schemas: Mapping[type[Struct], dict[str, Any]]
) -> dict[str, Any]:
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in named
    ]
    parameters += [
        {"name": name, "in": "query", "schema": NUMBERS.get(name, {"type": "string"})}
        for name in operation.query
    ]
    if operation.asks:
        parameters += [
            {"name": name, "in": "header", "schema": schema} for name, schema in HEADERS.items()
        ]
    failure = {JSON: {"schema": schemas[operation.failure]}}
    made: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('.', '_')}",
        "parameters": parameters,
        "responses": {
            "200": {"description": operation.summary, "content": _content(operation, schemas)},
            "4XX": {"description": "it is refused", "content": failure},
            "5XX": {"description": "it cannot be served, or failed", "content": failure},
        },
    }
    if path == "/ready":
        made["responses"]["503"] = {**made["responses"]["200"], "description": "it is not ready"}
    if operation.body is not None:
        content = {JSON: {"schema": schemas[operation.body]}}
        made["requestBody"] = {"required": True, "content": content}
    if operation.form:
        made["requestBody"] = {"required": True, "content": {FORM: {"schema": FORM_SCHEMA}}}
    return made


def _content(
    operation: Operation, schemas: Mapping[type[Struct], dict[str, Any]]
) -> dict[str, Any]:
    schema: dict[str, Any] = {} if operation.reply is None else schemas[operation.reply]
    content: dict[str, Any] = {operation.media_type: {"schema": schema}}
    if operation.streams:
        content[EVENTS] = {}  # its events are described in docs/http.md: 3.1 has no words for them
    return content
