"""Tests of the gateway's OpenAPI document: it has every route, and every field of every body."""

import json
import re
from types import SimpleNamespace

import msgspec
import pytest

from services.gateway import app, openapi
from services.gateway.api import chats, completions
from services.gateway.api.responses import responses
from services.gateway.config import GatewayConfig
from services.gateway.openapi import OPERATIONS

DOCUMENT = json.loads(openapi.document())


def test_the_document_has_every_route_and_no_other() -> None:
    gateway = app.Gateway.__new__(app.Gateway)
    for part in ("_texts", "_files", "_batches"):
        setattr(gateway, part, _Anything())
    gateway.http_requests = _Anything()  # type: ignore[assignment]
    gateway._cfg = GatewayConfig()
    gateway._console = SimpleNamespace(routes=list)  # type: ignore[assignment] # pages for people
    routes = {
        (method, re.sub(r":path}", "}", route.path))
        for route in gateway.app().routes
        for method in route.methods or ()  # type: ignore[attr-defined]
        if method != "HEAD"
    }
    assert routes == set(OPERATIONS)
    assert {
        (method.upper(), path) for path, found in DOCUMENT["paths"].items() for method in found
    } == routes


class _Anything:
    def __getattr__(self, name: str) -> "_Anything":
        return self

    def __call__(self, *_: object) -> "_Anything":
        return self


@pytest.mark.parametrize(
    "kind", [chats.ChatBody, completions.CompletionBody, responses.ResponseBody]
)
def test_every_field_of_a_body_is_in_the_document(kind: type[msgspec.Struct]) -> None:
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    assert set(schema["properties"]) == {
        field.encode_name for field in msgspec.structs.fields(kind)
    }
    assert schema["additionalProperties"] is False


def test_every_reference_leads_somewhere() -> None:
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(DOCUMENT)))
    assert names <= set(DOCUMENT["components"]["schemas"])
