"""The OpenAI client that users have, untouched, against a fleet of real processes on a real
nats-server.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from random import Random
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionChunk

from loadgen.fleet.fleet import Fleet, FleetSpec
from services.gateway.api.translate import id_of_choice
from shared import subjects
from shared.bus.nats import NatsBus
from shared.errors import PeerError
from shared.schemas import Cancel, GenerateRequest
from shared.subjects import request_key
from tests.fleet.api.scripted import client_of, model_of
from tests.fleet.live import WAIT_S, replay_of, until_idle

pytestmark = pytest.mark.asyncio(loop_scope="module")
T = TypeVar("T")
SEED = 20_261_121
TALK: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the sky blue?"},
]
# a minute of tokens: a test that waits for their end has not cancelled them
LONG = {"n": 3, "max_tokens": 7000, "stream": True}


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


async def in_thread(fleet: Fleet, ask: Callable[[openai.OpenAI], T]) -> T:
    """The answer that the synchronous client gets."""
    with openai.OpenAI(
        base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    ) as client:
        return await asyncio.to_thread(ask, client)


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    return "".join(
        c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index
    )


# ---------------------------------------------------------------- answers


async def test_a_chat_whole_and_streamed_by_both_clients_says_the_same(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    asked: dict[str, Any] = {
        "model": await model_of(client),
        "messages": TALK,
        "max_completion_tokens": 24,
        "seed": 7,
    }
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, **usage)]
    sync_whole = await in_thread(fleet, lambda sync: sync.chat.completions.create(**asked))
    sync_chunks = await in_thread(
        fleet, lambda sync: list(sync.chat.completions.create(**asked, **usage))
    )
    (choice,) = whole.choices
    assert (choice.index, choice.finish_reason) == (0, "length")
    assert (choice.message.role, choice.message.tool_calls) == ("assistant", None)
    assert choice.message.content
    assert sync_whole.choices == whole.choices
    assert whole.usage is not None
    assert (whole.model, whole.service_tier) == (asked["model"], "default")
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    for streamed in (chunks, sync_chunks):
        assert text_of(streamed) == choice.message.content
        assert streamed[0].choices[0].delta.role == "assistant"
        assert [
            c.finish_reason for chunk in streamed for c in chunk.choices if c.finish_reason
        ] == ["length"]
        assert streamed[-1].choices == []
        assert streamed[-1].usage == whole.usage


async def test_the_clients_own_helper_that_gathers_a_stream_ends_with_the_whole_message(
    client: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {
        "model": await model_of(client),
        "messages": TALK,
        "max_tokens": 200,
        "stop": " ",
        "n": 3,
        "seed": 2,
    }
    async with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    whole = await client.chat.completions.create(**asked)
    assert [choice.message.content for choice in final.choices] == [
        choice.message.content for choice in whole.choices
    ]
    assert (
        sum(map(len, pieces))
        == sum(len(choice.message.content or "") for choice in final.choices)
        > 0
    )


async def test_choices_have_seeds_of_their_own_and_say_what_they_would_say_alone(
    client: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {"model": await model_of(client), "messages": TALK, "max_tokens": 20}
    several = await client.chat.completions.create(**asked, n=3, seed=11)
    alone = [await client.chat.completions.create(**asked, seed=11 + i) for i in range(3)]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in several.choices]
    assert texts == [one.choices[0].message.content for one in alone]
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert alone[0].usage is not None
    assert (several.usage.completion_tokens, several.usage.prompt_tokens) == (
        60,
        alone[0].usage.prompt_tokens,
    )
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(**asked, n=3, seed=11, stream=True)
    ]
    assert [text_of(chunks, index) for index in range(3)] == texts


async def test_choices_are_streamed_side_by_side_and_not_one_after_the_other(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.chat.completions.create(
        model=await model_of(client), messages=TALK, **LONG
    )
    latest = -1
    async for chunk in stream:
        for choice in chunk.choices:
            if choice.delta.content and choice.index < latest:
                await stream.close()
                return
            latest = choice.index
    raise AssertionError("each choice came after the end of the one before")


async def test_an_answer_ends_before_its_stop_string(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model=await model_of(client), messages=TALK, max_tokens=200, stop=[" ", "zzzz"], seed=3
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.message.content
    assert " " not in choice.message.content


# ---------------------------------------------------------------- what is owed


async def test_the_answer_says_which_tier_was_used_and_flex_if_it_was_relegated(
    client: openai.AsyncOpenAI,
) -> None:
    slow = {"x-llm-d-slo-ttft-ms": "60000"}  # so that no machine is too slow for any of them
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


async def test_an_answer_is_an_error_and_not_shorter_if_another_client_cancels_a_choice(
    fleet: Fleet,
) -> None:
    async with fleet.connect("test") as bus, client_of(fleet) as client:
        name = uuid4().hex
        waiting = asyncio.create_task(
            client.chat.completions.create(
                model=await model_of(client),
                messages=TALK,
                max_tokens=7000,
                n=2,
                extra_headers={"idempotency-key": name},
            )
        )
        await until_made(bus, id_of_choice(name, 1))
        await bus.publish(subjects.cancel(request_key("default", id_of_choice(name, 1))), Cancel())
        with pytest.raises(openai.APIStatusError) as caught:
            await waiting
        assert (caught.value.status_code, caught.value.code) == (499, "request_cancelled")
        await until_idle(bus, fleet.replicas)


# ---------------------------------------------------------------- hanging up


async def until_made(bus: NatsBus, request_id: str) -> None:
    """Wait until the request has made a token, so that it holds KV."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(PeerError):  # not stored yet
                if (await replay_of(bus, GenerateRequest(request_id=request_id))).tokens:
                    return
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def until_freed(fleet: Fleet, name: str, choices: int) -> AsyncIterator[None]:
    """Every choice of the request made within is cancelled, and all KV is free again."""
    async with fleet.connect("test") as bus:
        yield
        await until_idle(bus, fleet.replicas)
        for request_id in (id_of_choice(name, index) for index in range(choices)):
            verdict = (await replay_of(bus, GenerateRequest(request_id=request_id))).verdict
            assert verdict is not None
            assert verdict.finish_reason == "cancelled"
            assert 0 < verdict.output_tokens < 7000


async def test_closing_a_stream_midway_cancels_every_choice_and_frees_its_kv(
    fleet: Fleet, client: openai.AsyncOpenAI
) -> None:
    asked = {"model": await model_of(client), "messages": TALK, **LONG}
    name = uuid4().hex
    async with until_freed(fleet, name, 3):
        stream = await client.chat.completions.create(
            **asked, extra_headers={"idempotency-key": name}
        )
        silent = {0, 1, 2}
        while silent:
            (choice,) = (await anext(stream)).choices
            if choice.delta.content:
                silent.discard(choice.index)
        await stream.close()


async def test_whenever_clients_leave_everything_they_asked_for_is_freed(fleet: Fleet) -> None:
    """Some leave before there is an answer, some in mid-stream, some at its end."""
    print(f"seed {SEED}")
    rng = Random(SEED)
    async with fleet.connect("test") as bus:

        async def come_and_go(stay_s: float, asked: dict[str, Any]) -> None:
            async with client_of(fleet) as client:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(stay_s):
                        stream = await client.chat.completions.create(
                            messages=TALK, model=model, stream=True, **asked
                        )
                        _ = [chunk async for chunk in stream]

        async with client_of(fleet) as client:
            model = await model_of(client)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(30):
                asked = {
                    "n": rng.randint(1, 4),
                    "max_tokens": rng.choice((20, 7000)),
                    "service_tier": rng.choice(("priority", "flex")),
                }
                tasks.create_task(come_and_go(rng.uniform(0.0, 0.5), asked))
                await asyncio.sleep(0.01)
        await until_idle(bus, fleet.replicas)


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


@pytest.mark.slow
async def test_a_real_model_tells_log_probabilities_in_both_apis_whole_and_streamed(
    torch_fleet: Fleet,
) -> None:
    async with client_of(torch_fleet) as client:
        asked: dict[str, Any] = {
            "model": await model_of(client),
            "messages": TALK,
            "max_tokens": 12,
            "temperature": 0,
        }
        asked |= {"logprobs": True, "top_logprobs": 3}
        name = {"idempotency-key": uuid4().hex}
        (choice,) = (await client.chat.completions.create(**asked, extra_headers=name)).choices
        assert (await client.chat.completions.create(**asked, extra_headers=name)).choices == [
            choice
        ], "attached to, read from the log"
        assert choice.logprobs is not None
        whole = choice.logprobs.content
        assert whole is not None
        spoken = [one for one in whole if not one.token.startswith("<|")]
        assert b"".join(bytes(one.bytes or []) for one in spoken).decode() == choice.message.content
        for one in whole:
            assert len(one.top_logprobs) == 3
            assert (
                one.logprob
                == one.top_logprobs[0].logprob
                == max(other.logprob for other in one.top_logprobs)
            ), "greedy"
            assert sum(math.exp(other.logprob) for other in one.top_logprobs) <= 1.0 + 1e-6
        chunks = [
            chunk async for chunk in await client.chat.completions.create(**asked, stream=True)
        ]
        streamed = [
            c.logprobs.content or []
            for chunk in chunks
            for c in chunk.choices
            if c.logprobs is not None
        ]
        assert [one.token for content in streamed for one in content] == [
            one.token for one in whole
        ]
        answer = await client.completions.create(
            model=asked["model"], prompt="Why?", max_tokens=12, logprobs=2, temperature=0, n=2
        )
        for alternative in answer.choices:
            columns = alternative.logprobs
            assert columns is not None
            assert columns.tokens is not None
            assert columns.text_offset == [
                sum(map(len, columns.tokens[:n])) for n in range(len(columns.tokens))
            ]
            assert columns.top_logprobs is not None
            assert columns.token_logprobs == [max(top.values()) for top in columns.top_logprobs]
            assert {len(top) for top in columns.top_logprobs} == {2}
