"""Tests of the responses API and of /tokenize, with a scripted engine and with a small model."""

import json
from typing import Any

import httpx
import openai
import pytest

from loadgen.fleet.fleet import Fleet
from tests.fleet.api.scripted import ANSWER, ASKS, CALLS, FUNCTIONS, WARMTH, model_of
from tests.fleet.live import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")
TOOLS: list[Any] = [{"type": "function", **function} for function in FUNCTIONS]


def called(response: Any) -> list[dict[str, Any]]:
    return [
        {"name": item.name, "arguments": json.loads(item.arguments)}
        for item in response.output
        if item.type == "function_call"
    ]


# ---------------------------------------------------------------- texts


async def test_a_text_whole_and_streamed_is_the_same(scripted: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": await model_of(scripted),
        "instructions": "Speak Latin.",
        "input": "Hello!",
        "metadata": {"run": "1"},
        "temperature": 0.5,
    }
    whole = await scripted.responses.create(**asked)
    assert (whole.output_text, whole.status, whole.object) == ("Salve.", "completed", "response")
    assert (whole.instructions, whole.metadata, whole.temperature) == (
        "Speak Latin.",
        {"run": "1"},
        0.5,
    )
    assert whole.id.startswith("resp_")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    async with scripted.responses.stream(**asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")] == list(
        range(len(events))
    )
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Salve."
    assert final.output_text == whole.output_text
    assert (final.usage, final.status, final.service_tier) == (
        whole.usage,
        whole.status,
        whole.service_tier,
    )


async def test_an_empty_text_is_a_message_all_the_same(scripted: openai.AsyncOpenAI) -> None:
    model = await model_of(scripted)
    whole = await scripted.responses.create(model=model, input="Say nothing.")
    async with scripted.responses.stream(model=model, input="Say nothing.") as stream:
        streamed = await stream.get_final_response()
    for response in (whole, streamed):
        assert [item.type for item in response.output] == ["message"]
        assert response.output_text == ""


async def test_a_text_that_is_cut_off_is_incomplete(scripted: openai.AsyncOpenAI) -> None:
    model = await model_of(scripted)
    whole = await scripted.responses.create(model=model, input="Why?", max_output_tokens=8)
    events = [
        event
        async for event in await scripted.responses.create(
            model=model, input="Why?", max_output_tokens=8, stream=True
        )
    ]
    assert events[-1].type == "response.incomplete"
    for response in (whole, events[-1].response):
        assert (response.status, response.output_text) == ("incomplete", "I cannot")
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].status == "incomplete"


async def test_the_items_of_a_talk_are_read_in_their_order(scripted: openai.AsyncOpenAI) -> None:
    model = await model_of(scripted)
    first = await scripted.responses.create(model=model, input="Who?")
    talk: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
        *first.output,
        {"type": "message", "role": "user", "content": "Speak Latin."},
    ]
    second = await scripted.responses.create(model=model, input=talk)
    assert second.output_text == "Salve."
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens


# ---------------------------------------------------------------- tools


async def test_a_loop_of_calls_and_results_ends_in_the_answer(scripted: openai.AsyncOpenAI) -> None:
    model = await model_of(scripted)
    items: list[Any] = [{"role": "user", "content": ASKS}]
    response = await scripted.responses.create(model=model, input=items, tools=TOOLS)
    assert called(response) == CALLS
    items += response.output
    for item in response.output:
        assert item.type == "function_call"
        output = WARMTH[json.loads(item.arguments)["city"]]
        items.append({"type": "function_call_output", "call_id": item.call_id, "output": output})
    response = await scripted.responses.create(model=model, input=items, tools=TOOLS)
    assert (response.output_text, called(response)) == (ANSWER, [])


async def test_calls_are_streamed_part_by_part(scripted: openai.AsyncOpenAI) -> None:
    model = await model_of(scripted)
    async with scripted.responses.stream(model=model, input=ASKS, tools=TOOLS) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert called(final) == CALLS
    parts = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert {part.output_index for part in parts} == {0, 1}
    assert len(parts) > 6
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == [call["arguments"] for call in CALLS]
    assert len({item.id for item in final.output}) == 2


async def test_without_parallel_calls_the_first_stays_alone(scripted: openai.AsyncOpenAI) -> None:
    response = await scripted.responses.create(
        model=await model_of(scripted), input=ASKS, tools=TOOLS, parallel_tool_calls=False
    )
    assert called(response) == CALLS[:1]


@pytest.mark.slow
async def test_a_model_is_held_to_the_named_tool(modelled: openai.AsyncOpenAI) -> None:
    response = await modelled.responses.create(
        model=await model_of(modelled),
        input=ASKS,
        tools=TOOLS,
        tool_choice={"type": "function", "name": "temperature"},
        max_output_tokens=200,
    )
    (call,) = called(response)
    assert call["arguments"]["city"] in WARMTH


@pytest.mark.slow
async def test_parse_gives_an_object_of_the_class(modelled: openai.AsyncOpenAI) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        warm: bool

    response = await modelled.responses.parse(
        model=await model_of(modelled),
        input="Name a city.",
        text_format=City,
        max_output_tokens=300,
        temperature=0,
    )
    assert isinstance(response.output_parsed, City)


@pytest.mark.slow
async def test_log_probabilities_come_with_the_text(modelled: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": await model_of(modelled),
        "input": "Name a city.",
        "max_output_tokens": 16,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = await modelled.responses.create(**asked)
    stream = await modelled.responses.create(**asked, stream=True)
    events = [event async for event in stream]
    part = whole.output[0].content[0]  # type: ignore[union-attr]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert len(part.logprobs) == 16
    assert all(len(one.top_logprobs) >= 2 for one in part.logprobs)
    streamed = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    assert [one.token for one in streamed] == [one.token for one in part.logprobs]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is kept"),
        ({"conversation": "conv_1"}, "conversation", "no response is kept"),
        ({"store": True}, "store", "no response is kept"),
        ({"background": True}, "background", "except as false"),
        ({"truncation": "auto"}, "truncation", "except as"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0]", "function_call_output"),
        ({"input": [{"role": "judge", "content": "x"}]}, "input[0]", "judge"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0]",
            "input_image",
        ),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": "required"},
            "tool_choice",
            "needs tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"surprise": 1}, "surprise", "unknown field"),
    ],
)
async def test_what_cannot_be_served_is_refused_by_its_name(
    scripted: openai.AsyncOpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    model = await model_of(scripted)
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.responses.create(
            model=model,
            input="Who?",
            extra_body=fields,
            extra_headers={"x-slackline-lenient": "false"},
        )
    assert refused.value.param == param
    assert words in refused.value.message


async def test_an_input_that_is_too_long_is_refused_as_openai_does(
    scripted: openai.AsyncOpenAI,
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await scripted.responses.create(model=await model_of(scripted), input="x" * 200_000)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


# ---------------------------------------------------------------- tokens


async def test_tokens_are_those_that_a_request_has(
    scripted_fleet: Fleet, scripted: openai.AsyncOpenAI
) -> None:
    model = await model_of(scripted)
    messages: list[Any] = [{"role": "user", "content": "Über?"}]
    async with httpx.AsyncClient(base_url=scripted_fleet.http_url, timeout=WAIT_S) as http:
        told = (await http.post("/tokenize", json={"messages": messages})).json()
        answer = await scripted.chat.completions.create(
            model=model, messages=messages, max_tokens=1
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == told["count"] == len(told["tokens"])
        assert told["max_model_len"] > 1000
        body = {"prompt": "Über?", "return_token_strs": True, "model": model}
        text = (await http.post("/tokenize", json=body)).json()
        assert text["tokens"] == list("Über?".encode())
        assert len(text["token_strs"]) == 6
        back = await http.post("/detokenize", json={"tokens": told["tokens"]})
        assert "Über?" in back.json()["prompt"]
        long = await http.post("/tokenize", json={"prompt": "x" * 900_000})
        assert long.json()["count"] == 900_000


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": [{"role": "judge"}]}, 400, "messages[0].role"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x", "tools": []}, 200, None),
        ("/tokenize", {"messages": [{"role": "user", "content": "x", "n": 2**70}]}, 400, None),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "n": 2**70}], "max_tokens": 1},
            400,
            None,
        ),
        ("/tokenize", {"prompt": "x" * 1_000_001}, 400, "prompt"),
        (
            "/tokenize",
            {"prompt": "x", "add_generation_prompt": False},
            400,
            "add_generation_prompt",
        ),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, 100_000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": []}, 200, None),
    ],
)
async def test_a_wrong_question_about_tokens_is_refused_by_its_name(
    scripted_fleet: Fleet, path: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with httpx.AsyncClient(base_url=scripted_fleet.http_url, timeout=WAIT_S) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert answer.json()["error"]["param"] == param
