"""Tests of how the gateway reads request bodies: what it accepts, and what it refuses, by field."""

import gzip
import json
from typing import Any

import pytest

from shared.schemas import Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured
from shared.text.chat_prompt import checked, labelled, marked
from tests.services.gateway.site import Site, new_id
from tests.services.gateway.standin_fleet import MODEL

STRICT = {"x-slackline-lenient": "false"}
TALK: list[Any] = [{"role": "user", "content": "hi"}]
PROMPTS = {"completions": {"prompt": "hi"}, "chat/completions": {"messages": TALK}}

# bytes, or fields beside the prompt; the parameter that the refusal names
MALFORMED: list[tuple[bytes | dict[str, Any], str | None]] = [
    (b"{", None),
    (b"\xff\xfe", None),
    (b'{"prompt": "caf\xe9"}', None),
    (b'"text"', None),
    (b"[" * 100_000, None),
    (b"{}", "prompt"),
    (b'{"prompt": "\\ud800"}', None),
    (b'{"prompt": "a", "' + b"x" * 1_000_000 + b'": 1}', None),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**20]}, "prompt[0]"),
    ({"prompt": ["a", "b", "c", "d", "e"], "n": 13}, "n"),
    ({"prompt": ["a"] * 65}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1], "echo": True}, "echo"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": True, "logprobs": 1}, "echo"),
    ({"stream_options": {"colour": 1}}, "stream_options.colour"),
    ({"messages": []}, "messages"),
]
BAD_HEADERS = {
    "x-slackline-tier": "slo.v1.>",
    "x-llm-d-inference-objective": "world peace",
    "idempotency-key": "",
    "x-llm-d-inference-fairness-id": ">",
    "x-llm-d-slo-ttft-ms": "-5",
    "x-slackline-allow-relegation": "perhaps",
    "x-slackline-verdict": "perhaps",
}
TOOL = {"type": "function", "function": {"name": "f"}}
BAD_TOOLS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    (
        {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
]
MALFORMED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"prompt": "hi"}, "prompt"),
    *BAD_TOOLS,
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"store": True}, "store"),
    ({"reasoning_effort": "utmost"}, "reasoning_effort"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]
LARGE_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"a": "x" * 70_000}}}
OUTPUTS = "structured_outputs"
WRONG_IN_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"service_tier": "platinum"}, "service_tier"),
    ({"colour": "red"}, "colour"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
    ({"response_format": LARGE_SCHEMA}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object"}, OUTPUTS: {"regex": "a"}}, OUTPUTS),
    ({OUTPUTS: {}}, OUTPUTS),
    ({OUTPUTS: {"regex": "a", "choice": ["b"]}}, OUTPUTS),
    ({OUTPUTS: {"choice": []}}, f"{OUTPUTS}.choice"),
    ({OUTPUTS: {"regex": "a", "whitespace_pattern": " "}}, f"{OUTPUTS}.whitespace_pattern"),
]
# Parameters of OpenAI's and vLLM's APIs that would change an answer and are not supported.
UNSUPPORTED: dict[str, Any] = {
    "best_of": 2, "use_beam_search": True, "length_penalty": 2.0, "prompt_logprobs": 1,
    "bad_words": ["a"], "allowed_token_ids": [1],
    "truncate_prompt_tokens": 5, "include_stop_str_in_output": True,
    "spaces_between_special_tokens": False,
    "guided_json": {}, "guided_regex": "a", "structural_tag": "a", "logits_processors": [],
    "thinking_token_budget": 4, "vllm_xargs": {},
    "repetition_detection": {}, "logprob_token_ids": [1], "add_special_tokens": False,
    "return_tokens_as_token_ids": True, "suffix": "a",
    "prediction": {}, "audio": {},
    "verbosity": "low",
    "add_generation_prompt": False,
    "continue_final_message": True, "documents": [], "chat_template": "a",
    "kv_transfer_params": {}, "cache_salt": "a", "mm_processor_kwargs": {},
}  # fmt: skip


@pytest.mark.parametrize("path", PROMPTS)
async def test_what_is_malformed_or_not_supported_is_a_400_with_its_field_and_goes_no_further(
    at: Site, path: str
) -> None:
    wrong = MALFORMED if path == "completions" else MALFORMED_CHATS
    unsupported = [({name: value}, name) for name, value in UNSUPPORTED.items()]
    bodies = [(fields, {}, param) for fields, param in (*wrong, *WRONG_IN_BOTH, *unsupported)]
    for fields, headers, param in (
        *bodies,
        *(({}, {name: value}, name) for name, value in BAD_HEADERS.items()),
    ):
        body = fields if isinstance(fields, bytes) else PROMPTS[path] | fields
        answer = await at.post(path, body, **STRICT, **headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert error["type"] == "invalid_request_error"
        assert answer.headers["x-request-id"]
        assert len(answer.content) < 1000
    assert at.fleet.asked == {}


UNKNOWN_FIELDS = [
    ("completions", "temprature", "; the nearest is `temperature`"),
    ("chat/completions", "mesages", "; the nearest is `messages`"),
    ("responses", "inputs", "; the nearest is `input`"),
    ("completions", "guided_choice", "; in its place there is `structured_outputs`, as in vLLM"),
    ("completions", "use_beam_search", ""),
]


async def test_an_unknown_field_is_told_with_the_one_that_may_be_meant(at: Site) -> None:
    for path, field, meant in UNKNOWN_FIELDS:
        answer = await at.post(path, {field: 1}, **STRICT)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert error["code"] == "unknown_parameter"
        assert error["message"] == (
            f"unknown field `{field}`{meant}; "
            "with x-slackline-lenient: true unknown fields are ignored"
        )
    # this path is never lenient
    error = (await at.client.post("/detokenize", json={"token": [1]})).json()["error"]
    assert error["message"] == "unknown field `token`; the nearest is `tokens`"


async def test_an_empty_and_a_compressed_body_are_called_so(at: Site) -> None:
    plain, gzipped = b'{"prompt": "hi"}', {"content-encoding": "gzip"}
    for empty in (b"", b" \n"):
        answer = await at.post("completions", empty)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (400, "the body is empty")
    answer = await at.post("completions", gzip.compress(plain), **gzipped)
    assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
    assert answer.headers["accept-encoding"] == "identity"
    assert (await at.post("completions", plain, **gzipped)).status_code == 200


CUT_OFF = '{"path": "a.txt", "text": "Once upo'
HISTORIES = {
    "a call cut off": {"tool_calls": [{"function": {"name": "write", "arguments": CUT_OFF}}]},
    "null": {"content": None, "refusal": "I cannot."},
    "no content": {},
    "no parts": {"content": [], "tool_calls": None},
    "a refusal": {"content": [{"type": "refusal", "refusal": "I cannot."}]},
}


async def test_an_assistants_turn_that_clients_send_again_and_again_is_taken(at: Site) -> None:
    for name, turn in HISTORIES.items():
        messages = [
            {"role": "user", "content": "Write the file."},
            {"role": "assistant", **turn},
            {"role": "tool", "tool_call_id": "call_1", "content": None},
            {"role": "user", "content": "Go on."},
        ]
        for render in (marked, labelled):
            assert "Go on." in render(checked(messages), [{"function": {"name": "write"}}], {})
        answer = await at.post("chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer.status_code == 200, name


async def test_what_real_clients_send_along_with_a_chat_is_taken(at: Site) -> None:
    key = new_id()
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = {
        "model": None,
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [part], "name": "ann", "refusal": None},
        ],
        "max_completion_tokens": 2,
        "max_tokens": 2,
        "user": "u1",
        "prompt_cache_key": "s1",
        "safety_identifier": "x",
        "metadata": {"team": "a"},
        "store": False,
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "top_p": 1,
        "frequency_penalty": 0,
        "logit_bias": None,
        "stream_options": None,
    }
    answer = await at.post("chat/completions", body, key)
    assert answer.status_code == 200, answer.text
    request = at.request(key)
    assert (request.session, request.sampling.max_tokens) == ("s1", 2)
    assert request.messages == body["messages"]


LIMITS = [
    ("completions", {"prompt": "hi"}, 16),
    ("chat/completions", {"messages": TALK}, 1_000_000),  # what fits
    ("chat/completions", {"messages": TALK, "logprobs": True}, 8192),
    ("completions", {"prompt": "hi", "max_tokens": 99_999_999}, 1_000_000),
    ("chat/completions", {"messages": TALK, "max_completion_tokens": 99_999_999}, 1_000_000),
    ("responses", {"input": "hi", "max_output_tokens": 99_999_999}, 1_000_000),
]


async def test_a_limit_of_tokens_that_is_not_given_has_a_default_and_a_large_one_is_cut(
    at: Site,
) -> None:
    for path, body, limit in LIMITS:
        key = new_id()
        assert (await at.post(path, body, key)).status_code == 200
        assert at.request(key).sampling.max_tokens == limit, body


# ---------------------------------------------------------------- sampling, formats, adapters


async def test_openai_client_names_penalties_biases_and_a_schema(at: Site) -> None:
    key = new_id()
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
        "required": ["b"],
    }
    thing = {"name": "thing", "strict": True, "schema": schema}
    async with at.openai() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=TALK,
            max_tokens=5,
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            logit_bias={"50": -100, "7": 3},
            response_format={"type": "json_schema", "json_schema": thing},
            extra_body={"min_p": 0.25, "repetition_penalty": 1.25, "min_tokens": 2, "top_k": 3},
            extra_headers={"idempotency-key": key},
        )
    sampling = at.request(key).sampling
    assert isinstance(sampling.structured, JsonSchema)
    assert json.loads(sampling.structured.schema) == schema
    # the order in which they are to be written
    assert list(json.loads(sampling.structured.schema)["properties"]) == ["b", "a"]
    assert sampling == Sampling(
        max_tokens=5, presence_penalty=0.5, frequency_penalty=-1.5, logit_bias={50: -100.0, 7: 3.0},
        min_p=0.25, repetition_penalty=1.25,
        min_tokens=2, top_k=3, structured=sampling.structured,
    )  # fmt: skip


TEXT, ANY_JSON = {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": True}}
FORMATS: list[tuple[dict[str, Any], Structured | None]] = [
    ({"response_format": TEXT}, None),
    ({"response_format": None, OUTPUTS: None}, None),
    ({"response_format": {"type": "json_object"}}, JsonObject()),
    ({"response_format": ANY_JSON}, JsonSchema(schema="true")),
    ({"response_format": TEXT, OUTPUTS: {"regex": "a+"}}, Regex(pattern="a+")),
    ({OUTPUTS: {"json": {"type": "null"}}}, JsonSchema(schema='{"type":"null"}')),
    ({OUTPUTS: {"json": '{"type": "null"}'}}, JsonSchema(schema='{"type": "null"}')),
    ({OUTPUTS: {"json_object": True}}, JsonObject()),
    ({OUTPUTS: {"choice": ["yes", "no"]}}, Choice(options=["yes", "no"])),
    ({OUTPUTS: {"grammar": 'root ::= "a"'}}, Grammar(ebnf='root ::= "a"')),
]
NEUTRAL = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
}


async def test_formats_of_openai_and_vllm_are_one_vocabulary_and_neutral_values_ask_for_nothing(
    at: Site,
) -> None:
    neutral = [(NEUTRAL, None), (dict.fromkeys(NEUTRAL), None)]
    for path, prompt in PROMPTS.items():
        for fields, structured in (*FORMATS, *neutral):
            key = new_id()
            answer = await at.post(path, prompt | fields | {"max_tokens": 1}, key)
            assert answer.status_code == 200, answer.text
            assert at.request(key).sampling == Sampling(max_tokens=1, structured=structured)


async def test_adapters_are_listed_beside_their_model_and_answer_by_their_name(at: Site) -> None:
    listed: list[Any] = []
    while len(listed) < 3:
        await at.fleet.digest("poet", "clerk")
        listed = (await at.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model.get("parent")) for model in listed] == [
        (MODEL, None),
        ("clerk", MODEL),
        ("poet", MODEL),
    ]
    async with at.openai() as client:
        assert (await client.models.retrieve("poet")).id == "poet"
        answer = await client.completions.create(model="poet", prompt="hi", max_tokens=1)
        assert answer.model == "poet"
    (running,) = at.fleet.asked.values()
    assert running.request.model == "poet"  # what that names, admission knows
