"""Tests of tool calls by the OpenAI client, with a scripted engine and with a small model."""

import json
from typing import Any

import openai
import pytest

from tests.fleet.api.scripted import ANSWER, ASKS, CALLS, FUNCTIONS, WARMTH, model_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALK: list[Any] = [{"role": "user", "content": ASKS}]
TOOLS: list[Any] = [{"type": "function", "function": function} for function in FUNCTIONS]


async def ask(client: openai.AsyncOpenAI, **more: Any) -> Any:
    """The only choice of an answer."""
    model = await model_of(client)
    fields: dict[str, Any] = {"messages": TALK, "tools": TOOLS, **more}
    answer = await client.chat.completions.create(model=model, **fields)
    return answer.choices[0]


def called(message: Any) -> list[dict[str, Any]]:
    return [
        {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
        for call in message.tool_calls or ()
    ]


async def test_a_loop_of_calls_and_results_ends_in_the_answer(scripted: openai.AsyncOpenAI) -> None:
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
    choice = await ask(scripted, messages=[*TALK, choice.message, *results])
    assert (choice.finish_reason, choice.message.content) == ("stop", ANSWER)
    assert choice.message.tool_calls is None


async def test_the_client_s_own_runner_gathers_a_stream_of_calls(
    scripted: openai.AsyncOpenAI,
) -> None:
    model = await model_of(scripted)
    fields: dict[str, Any] = {"messages": TALK, "tools": TOOLS}
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
async def test_a_model_is_held_to_the_named_tool(modelled: openai.AsyncOpenAI) -> None:
    named = {"type": "function", "function": {"name": "temperature"}}
    for seed in range(3):
        choice = await ask(modelled, tool_choice=named, seed=seed, max_tokens=200)
        (call,) = called(choice.message)
        assert (call["name"], choice.finish_reason) == ("temperature", "stop")
        assert call["arguments"]["city"] in WARMTH
