"""Calls of tools by the OpenAI client: with a fleet whose engine replays a script, and with a small
model that is held to the format of a call.
"""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.fleet.live import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
ASKS: list[Any] = [{"role": "user", "content": "How warm is it in Oslo and Rome?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "temperature", "description": "In °C.", "parameters": CITY},
    },
    {"type": "function", "function": {"name": "now"}},
]
CALLS = [{"name": "temperature", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
WARMTH = {"Oslo": "4", "Rome": "19"}
ANSWER = "It is 4 °C in Oslo, and 19 °C in Rome."
# the rules in order: the results are in the prompt, one city is asked for, tools are there at all
SCRIPT = [
    {"prompt": "The function returned: 19", "say": ANSWER},
    {"prompt": "only Rome", "say": json.dumps(CALLS[1])},
    {"prompt": "You may call these functions", "say": json.dumps(CALLS)},
    {"say": "I cannot know."},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[openai.AsyncOpenAI]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    environment = {"SLACKLINE_WORKER_SCRIPT": str(script)}
    spec = FleetSpec(pace=0.1, drain_s=2.0, environment=environment)
    async with Fleet(spec) as fleet, client_of(fleet) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def modelled() -> AsyncIterator[openai.AsyncOpenAI]:
    pytest.importorskip("torch")
    spec = FleetSpec(replicas=1, engine="torch", drain_s=2.0)
    async with Fleet(spec) as fleet, client_of(fleet) as client:
        yield client


def client_of(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0, timeout=WAIT_S
    )


async def ask(client: openai.AsyncOpenAI, **more: Any) -> Any:
    """The only choice of an answer."""
    model = (await client.models.list()).data[0].id
    fields: dict[str, Any] = {"messages": ASKS, "tools": TOOLS, **more}
    answer = await client.chat.completions.create(model=model, **fields)
    return answer.choices[0]


def called(message: Any) -> list[dict[str, Any]]:
    return [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.tool_calls or ()
    ]


async def test_a_loop_of_calls_and_results_ends_in_the_answer(
    scripted: openai.AsyncOpenAI,
) -> None:
    choice = await ask(scripted)
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert called(choice.message) == CALLS
    assert len({call.id for call in choice.message.tool_calls}) == 2
    results = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": WARMTH[json.loads(call.function.arguments)["city"]],
        }
        for call in choice.message.tool_calls
    ]
    choice = await ask(scripted, messages=[*ASKS, choice.message, *results])
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)
    assert choice.message.tool_calls is None


async def test_calls_are_streamed_part_by_part(scripted: openai.AsyncOpenAI) -> None:
    model = (await scripted.models.list()).data[0].id
    stream = await scripted.chat.completions.create(
        model=model, messages=ASKS, tools=TOOLS, stream=True
    )
    calls: dict[int, dict[str, str]] = {}
    parts, reasons = 0, []
    async for chunk in stream:
        (choice,) = chunk.choices
        assert not choice.delta.content
        if choice.finish_reason:
            reasons.append(choice.finish_reason)
        for part in choice.delta.tool_calls or ():
            call = calls.setdefault(part.index, {"name": "", "arguments": "", "id": ""})
            call["name"] += part.function.name or ""
            call["arguments"] += part.function.arguments or ""
            call["id"] += part.id or ""
            parts += 1
    assert reasons == ["tool_calls"]
    assert [call["name"] for call in calls.values()] == [call["name"] for call in CALLS]
    assert [json.loads(c["arguments"]) for c in calls.values()] == [c["arguments"] for c in CALLS]
    assert all(call["id"].startswith("call_") for call in calls.values())
    assert parts > 6  # not each in one piece


async def test_the_client_s_own_runner_gathers_a_stream_of_calls(
    scripted: openai.AsyncOpenAI,
) -> None:
    model = (await scripted.models.list()).data[0].id
    fields: dict[str, Any] = {"messages": ASKS, "tools": TOOLS}
    async with scripted.chat.completions.stream(model=model, **fields) as stream:
        answer = await stream.get_final_completion()
    assert called(answer.choices[0].message) == CALLS


async def test_one_call_alone_where_several_are_not_wanted(scripted: openai.AsyncOpenAI) -> None:
    choice = await ask(scripted, parallel_tool_calls=False)
    assert called(choice.message) == CALLS[:1]
    only_rome = [{"role": "user", "content": "How warm is only Rome?"}]
    assert called((await ask(scripted, messages=only_rome)).message) == CALLS[1:]


async def test_without_a_choice_of_tools_none_is_shown(scripted: openai.AsyncOpenAI) -> None:
    for fields in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        choice = await ask(scripted, **fields)
        assert (choice.message.content, choice.finish_reason) == ("I cannot know.", "stop")


async def test_an_engine_without_formats_is_asked_for_a_required_call_all_the_same(
    scripted: openai.AsyncOpenAI,
) -> None:
    assert called((await ask(scripted, tool_choice="required")).message) == CALLS


async def test_a_model_is_held_to_a_required_call(modelled: openai.AsyncOpenAI) -> None:
    for seed in range(4):
        choice = await ask(
            modelled, tool_choice="required", parallel_tool_calls=False, seed=seed, max_tokens=400
        )
        (call,) = called(choice.message)
        known = call["arguments"].get("city") in WARMTH
        assert known if call["name"] == "temperature" else call == {"name": "now", "arguments": {}}
        assert choice.finish_reason == "tool_calls"


@pytest.mark.slow
async def test_a_model_may_be_held_to_several_calls(modelled: openai.AsyncOpenAI) -> None:
    """This one seldom stops by itself: its last call may be cut off."""
    choice = await ask(modelled, tool_choice="required", seed=1, max_tokens=200)
    assert choice.finish_reason in ("tool_calls", "length")
    whole = choice.message.tool_calls[: -1 if choice.finish_reason == "length" else None]
    for call in whole:
        assert call.function.name in ("temperature", "now")
        assert isinstance(json.loads(call.function.arguments), dict)


@pytest.mark.slow
async def test_a_model_is_held_to_the_named_tool(modelled: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "temperature"}}
    for seed in range(3):
        choice = await ask(modelled, tool_choice=named, seed=seed, max_tokens=200)
        (call,) = called(choice.message)
        assert (call["name"], choice.finish_reason) == ("temperature", "stop")
        assert call["arguments"]["city"] in WARMTH


@pytest.mark.slow
async def test_a_model_that_is_not_held_answers_in_text(modelled: openai.AsyncOpenAI) -> None:
    choice = await ask(modelled, temperature=0, max_tokens=40)
    assert choice.message.content
    assert choice.message.tool_calls is None


@pytest.mark.slow
async def test_parse_gives_an_object_of_the_class(modelled: openai.AsyncOpenAI) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        warm: bool

    model = (await modelled.models.list()).data[0].id
    answer = await modelled.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "Name a city."}],
        response_format=City,
        max_tokens=300,
        temperature=0,
    )
    city = answer.choices[0].message.parsed
    assert isinstance(city, City)
