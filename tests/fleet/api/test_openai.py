"""Tests of a real fleet by the OpenAI client: chats, tiers, models, errors and formats."""

import asyncio
from collections.abc import AsyncIterator
from importlib.metadata import version
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.fleet.api.scripted import client_of, model_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(FleetSpec(pace=0.5, drain_s=2.0)) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == [], (
            "a client's messages ended a service"
        )


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(fleet) as client:
        yield client


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)


# ---------------------------------------------------------------- answers


async def test_a_chat_whole_and_streamed_says_the_same(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": await model_of(client),
        "messages": TALK,
        "max_completion_tokens": 24,
        "seed": 7,
    }
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **usage)]
    (choice,) = whole.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
    assert choice.message.content
    assert whole.usage is not None
    assert (whole.model, whole.service_tier) == (asked["model"], "default")
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    assert text_of(chunks) == choice.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == [
        "length"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


# ---------------------------------------------------------------- what is owed


async def test_the_answer_says_which_tier_was_used_and_flex_if_it_was_relegated(
    client: openai.AsyncOpenAI,
) -> None:
    # so that no machine is too slow for any of them
    slow = {"x-llm-d-slo-ttft-ms": "60000", "x-llm-d-slo-tpot-ms": "none"}
    asked: dict[str, Any] = {"model": await model_of(client), "messages": TALK, "max_tokens": 3}
    tiers = [
        (
            await client.chat.completions.create(**asked, service_tier=tier, extra_headers=slow)
        ).service_tier
        for tier in ("auto", "default", "priority", "flex")
    ]
    assert tiers == ["default", "default", "priority", "flex"]
    hopeless = {"x-llm-d-slo-ttft-ms": "0.1", "x-llm-d-slo-tpot-ms": "1000"}
    late = await client.chat.completions.create(
        **asked, service_tier="priority", extra_headers=hopeless, n=2
    )
    assert late.service_tier == "flex"
    chunks = [
        c
        async for c in await client.chat.completions.create(
            **asked, extra_headers=hopeless, stream=True
        )
    ]
    assert chunks[-1].service_tier == "flex"
    with pytest.raises(openai.BadRequestError, match="earliest first token in") as refused:
        await client.chat.completions.create(
            **asked, extra_headers=hopeless | {"x-slackline-allow-relegation": "false"}, n=2
        )
    assert refused.value.code == "unattainable_slo"


async def test_a_model_tells_its_context_and_the_fleet_its_version(
    client: openai.AsyncOpenAI,
) -> None:
    listed = await client.models.list()
    (model,) = listed.data
    assert model.model_extra == {"max_model_len": 8192}
    root = str(client.base_url).removesuffix("/").removesuffix("/v1")
    async with httpx.AsyncClient(trust_env=False) as http:
        told = await http.get(f"{root}/version")
    assert told.json() == {"version": version("slackline")}


# ---------------------------------------------------------------- errors

# What the fleet refuses; the gateway's own refusals are in the tests of its bodies.
UNSUPPORTED = "unsupported_parameter"
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"model": "gpt-17"}, "model_not_found", "model"),
    ({"messages": []}, "invalid_request_error", "messages"),
    ({"messages": [{"role": "wizard"}]}, "invalid_request_error", "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": "a" * 9000}]},
        "context_length_exceeded",
        "messages",
    ),
    (
        {"extra_body": {"chat_template_kwargs": {"messages": []}}},
        "invalid_request_error",
        "chat_template_kwargs",
    ),
    ({"extra_headers": {"x-slackline-tier": "gold"}}, "unknown_tier", "x-slackline-tier"),
    # the simulated engine has none
    ({"response_format": {"type": "json_object"}}, UNSUPPORTED, "response_format"),
    ({"extra_body": {"min_p": 0.1}}, UNSUPPORTED, "min_p"),
    ({"logprobs": True}, UNSUPPORTED, "logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_wrong_is_raised_as_the_right_error_and_names_the_field(
    client: openai.AsyncOpenAI, stream: bool
) -> None:
    model = await model_of(client)
    for change, code, param in WRONG:
        kind = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(
                **{"model": model, "messages": TALK, "max_tokens": 3, "stream": stream} | change
            )
        assert (caught.value.code, caught.value.param) == (code, param), change
        assert caught.value.request_id


# ---------------------------------------------------------------- hanging up


# ---------------------------------------------------------------- a model that computes


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def torch_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    pytest.importorskip("torch")
    from tests.services.worker import random_llama

    model = await asyncio.to_thread(random_llama.make, tmp_path_factory.mktemp("model"))
    async with Fleet(
        FleetSpec(engine="torch", model=str(model), profile="cpu-tiny", replicas=1, drain_s=2.0)
    ) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == [], (
            "a client's messages ended a service"
        )


BOMBS = [
    {"type": "integer", "multipleOf": 99999989},
    {"type": "string", "allOf": [{"pattern": f"a{n}"} for n in range(26)]},
]


@pytest.mark.slow
async def test_a_schema_that_never_compiles_is_its_own_requests_400_and_stops_nobody(
    torch_fleet: Fleet,
) -> None:
    """It took all time and memory of the engine, and then of the next one."""
    async with client_of(torch_fleet) as client:
        asked: dict[str, Any] = {"model": await model_of(client), "messages": TALK}
        stream = await client.chat.completions.create(
            **asked, max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )

        async def refused(schema: dict[str, Any]) -> None:
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            with pytest.raises(openai.BadRequestError, match="too complex"):
                await client.chat.completions.create(**asked, response_format=wanted)

        bombs = [asyncio.ensure_future(refused(schema)) for schema in BOMBS]
        ends = [chunk.choices[0].finish_reason async for chunk in stream if chunk.choices]
        assert ends[-1] == "length"
        await asyncio.gather(*bombs)
        good = await client.chat.completions.create(
            **asked, max_tokens=50, response_format={"type": "json_object"}
        )
        assert (good.choices[0].message.content or "").startswith("{")
