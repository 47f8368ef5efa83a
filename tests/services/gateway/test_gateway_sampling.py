"""Parameters of sampling, formats and adapters over HTTP: which reach the fleet, and which are
refused.
"""

import json
from typing import Any

import openai
import pytest

from services.gateway.http import envelope
from shared.schemas import GenerateRequest, Refused, Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, Structured
from tests.services.gateway.standin_fleet import MODEL
from tests.services.gateway.test_gateway import Site, key_of, new_id, site

TALK: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"type": "string"}},
    "required": ["b"],
}


async def asked(at: Site, kind: str, **body: Any) -> GenerateRequest:
    """The request that reaches the fleet when this body is posted."""
    request_id = new_id()
    async with at.http() as http:
        answer = await http.post(f"/v1/{kind}", json=body, headers={"idempotency-key": request_id})
    assert answer.status_code == 200, answer.text
    return at.fleet.asked[key_of(request_id)].request


async def test_openai_client_names_penalties_biases_and_a_schema(nats_url: str) -> None:
    request_id = new_id()
    async with site(nats_url) as at, at.openai() as client:
        await client.chat.completions.create(
            model=MODEL,
            messages=TALK,
            max_tokens=5,
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            logit_bias={"50": -100, "7": 3},
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA},
            },
            extra_body={"min_p": 0.25, "repetition_penalty": 1.25, "min_tokens": 2, "top_k": 3},
            extra_headers={"idempotency-key": request_id},
        )
        sampling = at.fleet.asked[key_of(request_id)].request.sampling
    assert isinstance(sampling.structured, JsonSchema)
    assert json.loads(sampling.structured.schema) == SCHEMA
    # the order in which they are to be written
    assert list(json.loads(sampling.structured.schema)["properties"]) == ["b", "a"]
    assert sampling == Sampling(
        max_tokens=5, presence_penalty=0.5, frequency_penalty=-1.5, logit_bias={50: -100.0, 7: 3.0},
        min_p=0.25, repetition_penalty=1.25,
        min_tokens=2, top_k=3, structured=sampling.structured,
    )  # fmt: skip


FORMATS: list[tuple[dict[str, Any], Structured | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, JsonObject()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
        JsonSchema(schema="true"),
    ),
    (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": "a+"}},
        Regex(pattern="a+"),
    ),
    ({"structured_outputs": {"json": {"type": "null"}}}, JsonSchema(schema='{"type":"null"}')),
    ({"structured_outputs": {"json": '{"type": "null"}'}}, JsonSchema(schema='{"type": "null"}')),
    ({"structured_outputs": {"json_object": True}}, JsonObject()),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Choice(options=["yes", "no"])),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar(ebnf='root ::= "a"')),
]


async def test_formats_of_openai_and_vllm_are_one_vocabulary(nats_url: str) -> None:
    async with site(nats_url) as at:
        for fields, structured in FORMATS:
            assert (
                await asked(at, "chat/completions", messages=TALK, max_tokens=1, **fields)
            ).sampling.structured == structured
            assert (
                await asked(at, "completions", prompt="hi", max_tokens=1, **fields)
            ).sampling.structured == structured


async def test_neutral_values_ask_for_nothing(nats_url: str) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0,
        "repetition_penalty": 1,
        "logit_bias": {},
        "min_p": 0,
        "min_tokens": 0,
    }
    async with site(nats_url) as at:
        for fields in (neutral, dict.fromkeys(neutral)):
            assert (
                await asked(at, "completions", prompt="hi", max_tokens=1, **fields)
            ).sampling == Sampling(max_tokens=1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
    ({"min_p": 2}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "thing"}}},
        "response_format",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"a": "x" * 70_000}},
            }
        },
        "response_format",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
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


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
async def test_no_parameter_is_ignored_in_silence(nats_url: str, kind: str) -> None:
    prompt = {"prompt": "hi"} if kind == "completions" else {"messages": TALK}
    async with site(nats_url) as at, at.http() as http:
        for fields, param in [
            *WRONG,
            *(({name: value}, name) for name, value in UNSUPPORTED.items()),
        ]:
            answer = await http.post(f"/v1/{kind}", json=prompt | fields)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["type"]) == (
                400,
                param,
                "invalid_request_error",
            ), error
        assert at.fleet.asked == {}


async def test_adapters_are_listed_beside_their_model_and_answer_by_their_name(
    nats_url: str,
) -> None:
    async with site(nats_url) as at, at.openai() as client:
        await at.fleet.digest("poet", "clerk")
        listed: list[Any] = []
        async with at.http() as http:
            while len(listed) < 3:
                listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model.get("parent")) for model in listed] == [
            (MODEL, None),
            ("clerk", MODEL),
            ("poet", MODEL),
        ]
        assert (await client.models.retrieve("poet")).id == "poet"
        answer = await client.completions.create(model="poet", prompt="hi", max_tokens=1)
        assert answer.model == "poet"
        (running,) = at.fleet.asked.values()
        assert running.request.model == "poet"  # what that names, admission knows


@pytest.mark.parametrize(
    ("param", "over_http"),
    [
        ("structured", "response_format"),
        ("adapter", "model"),
        ("min_p", "min_p"),
        ("token_ids", "prompt"),
        (None, None),
    ],
)
def test_a_refusal_names_the_parameter_as_it_is_called_over_http(
    param: str | None, over_http: str | None
) -> None:
    problem = envelope.of_refused(
        Refused(code="unsupported_parameter", message="no replica supports it", param=param)
    )
    assert (problem.status, problem.code, problem.param) == (
        400,
        "unsupported_parameter",
        over_http,
    )


async def test_openai_client_raises_what_admission_refuses(nats_url: str) -> None:
    async with site(nats_url) as at, at.openai() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model=MODEL, prompt="refuse unsupported_parameter")
        assert (caught.value.code, caught.value.status_code) == ("unsupported_parameter", 400)
