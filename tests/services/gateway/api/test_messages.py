"""Tests of Anthropic's messages by raw HTTP: the form of answers, streams and failures, and what a
request is read as. tests/clients has the `anthropic` package.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from shared.schemas import Thinking
from shared.structured import JsonSchema
from tests.services.gateway.http.test_guard import keys_in
from tests.services.gateway.site import Site, new_id, site, sse
from tests.services.gateway.standin_fleet import MODEL

ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 3,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOL = {"name": "f", "description": "Adds.", "input_schema": {"type": "object"}}
CALL = ['{"name": "f", ', '"arguments": ', '{"a": 1}}']
USAGE = {
    "input_tokens": 3, "cache_read_input_tokens": 0, "output_tokens": 3,
    "output_tokens_details": None, "cache_creation_input_tokens": 0, "cache_creation": None,
    "inference_geo": None, "server_tool_use": None, "service_tier": None,
}  # fmt: skip


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said, "citations": None}


def assembled(raw: str) -> dict[str, Any]:
    """The message that a client puts together of its events."""
    message: dict[str, Any] = {}
    arguments = ""
    for event in sse(raw):
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["stop_reason"] is None
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                delta, block = event["delta"], message["content"][event["index"]]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                if arguments:
                    message["content"][event["index"]]["input"] = json.loads(arguments)
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    assert sse(raw)[-1] == {"type": "message_stop"}
    return message


async def test_a_message_is_answered_whole_in_the_words_of_anthropic(at: Site) -> None:
    answer = await at.post("messages", ASKED, key := new_id())
    assert answer.json() == {
        "id": f"msg_{key}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": [text(" w0 w1 w2")],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": USAGE,
        "service_tier": "default",
    }


ANSWERS: list[tuple[list[str], dict[str, Any], list[dict[str, Any]], str]] = [
    (["It", " flows."], {}, [text("It flows.")], "end_turn"),
    (
        ["Hm.", "</think>", "\n\nIt"],
        {},
        [{"type": "thinking", "thinking": "Hm.", "signature": ""}, text("It")],
        "end_turn",
    ),
    (
        ["Hm.", "</think>", *CALL],
        {"tools": [TOOL]},
        [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {
                "type": "tool_use",
                "id": "",
                "name": "f",
                "input": {"a": 1},
                "caller": {"type": "direct"},
            },
        ],
        "tool_use",
    ),
]


@pytest.mark.parametrize(("words", "more", "content", "reason"), ANSWERS)
async def test_a_stream_adds_up_to_the_message_that_is_sent_whole(
    at: Site, words: list[str], more: dict[str, Any], content: list[dict[str, Any]], reason: str
) -> None:
    at.fleet.says = words
    at.fleet.thinking = Thinking(end="</think>", begun=True) if "</think>" in words else None
    asked = ASKED | more | {"max_tokens": 10}
    whole = (await at.post("messages", asked, key := new_id())).json()
    streamed = assembled((await at.post("messages", asked | {"stream": True}, key)).text)
    assert streamed == whole
    for block in whole["content"]:
        if block["type"] == "tool_use":
            assert block["id"].startswith("call_")
            block["id"] = ""
    assert (whole["content"], whole["stop_reason"]) == (content, reason)


async def test_each_event_is_named_and_blocks_do_not_overlap(at: Site) -> None:
    answer = await at.post("messages", ASKED | {"stream": True})
    names = [line[7:] for line in answer.text.split("\n") if line.startswith("event: ")]
    assert names == [event["type"] for event in sse(answer.text)]
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * 3,
        "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip


HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Add "}, {"type": "text", "text": "1"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well:"},
            {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"},
            {"type": "tool_result", "tool_use_id": "toolu_2", "is_error": True},
            {"type": "text", "text": "So?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


async def test_blocks_are_read_as_the_messages_of_a_chat(at: Site) -> None:
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    asked = ASKED | {"messages": HISTORY, "system": system}
    assert (await at.post("messages", asked, key := new_id())).status_code == 200
    function = {"name": "f", "arguments": '{"a":1}'}
    assert at.request(key).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add 1"},
        {
            "role": "assistant",
            "content": "Well:",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
        {"role": "user", "content": "So?"},
    ]


async def test_the_other_fields_are_those_of_a_chat_by_anthropics_names(at: Site) -> None:
    schema = {"type": "object"}
    asked = ASKED | {
        "stop_sequences": ["\n"],
        "temperature": 0.5,
        "top_k": 4,
        "metadata": {"user_id": "ann" + 490 * "0" + "_session_1"},
        "service_tier": "standard_only",
        "thinking": {"type": "enabled", "budget_tokens": 2048},
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": schema}},
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
    }
    answer = await at.post("messages", asked, key := new_id(), x_slackline_tier="summary")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-slackline-ignored"] == (
        "tools.web_search_20250305, thinking.budget_tokens"
    )
    request = at.request(key)
    assert (request.sampling.stop, request.sampling.top_k) == (["\n"], 4)
    assert len(request.session) == 128
    assert request.session.endswith("0_session_1")
    assert request.sampling.structured == JsonSchema(schema='{"type":"object"}')
    assert request.chat_template_kwargs == {"reasoning_effort": "xhigh", "enable_thinking": True}
    assert at.fleet.tiers[next(iter(at.fleet.tiers))] == "summary"
    off = ASKED | {"thinking": {"type": "disabled"}, "service_tier": "priority"}
    answer = await at.post("messages", off, key := new_id())
    assert answer.json()["service_tier"] == "priority"
    assert at.request(key).chat_template_kwargs == {"enable_thinking": False}


async def test_a_tool_that_must_be_used_is_held_to_its_form(at: Site) -> None:
    for choice, parallel in (({"type": "any"}, False), ({"type": "tool", "name": "f"}, True)):
        asked = ASKED | {"tools": [TOOL], "tool_choice": choice}
        if not parallel:
            asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
        answer = await at.post("messages", asked, key := new_id())
        assert answer.status_code == 200, answer.text
        tools = at.request(key).tools
        assert [tool["function"]["name"] for tool in tools] == ["f"]
    asked = ASKED | {"tools": [TOOL], "tool_choice": {"type": "none"}}
    answer = await at.post("messages", asked, key := new_id())
    assert answer.status_code == 200
    assert at.request(key).tools == []


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0]"),
    ({"messages": [*HISTORY, {"role": "assistant", "content": "So"}]}, "messages"),
    ({"tools": [{"name": "f"}]}, "input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"thinking": {"type": "perhaps"}}, "thinking"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"service_tier": "platinum"}, "service_tier"),
]


async def test_what_is_wrong_is_told_in_anthropics_form_with_its_field(at: Site) -> None:
    image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
    pictures = [
        ({"messages": [{"role": "user", "content": [image]}]}, "messages[0].content[0]"),
        ({"system": [image]}, "system[0]"),
    ]
    for fields, named in (*pictures, *WRONG):
        answer = await at.post("messages", ASKED | fields)
        body = answer.json()
        assert (answer.status_code, body["type"]) == (400, "error"), fields
        assert body["error"]["type"] == "invalid_request_error"
        assert named in body["error"]["message"], body
        assert body["request_id"] == answer.headers["x-request-id"]
        if (fields, named) in pictures:
            assert "'image'" in body["error"]["message"]
            assert "multimodal" in body["error"]["message"]
    assert at.fleet.asked == {}


ENDS = [
    ("refuse permission_denied", 403, "permission_error"),
    ("refuse model_not_found", 404, "not_found_error"),
    ("refuse rate_limit_exceeded", 429, "rate_limit_error"),
    ("end refused", 429, "rate_limit_error"),
    ("end failed", 500, "api_error"),
    ("end expired", 504, "timeout_error"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_refusal_and_bad_end_has_anthropics_name(at: Site, stream: bool) -> None:
    for prompt, status, kind in ENDS:
        asked = ASKED | {"messages": [{"role": "user", "content": prompt}], "stream": stream}
        answer = await at.post("messages", asked)
        assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind), prompt
        assert ("retry-after" in answer.headers) == (status == 429)
    asked = ASKED | {"messages": [{"role": "user", "content": "break"}], "stream": True}
    last = sse((await at.post("messages", asked)).text)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")


async def test_headers_and_verdicts_are_those_of_chats(at: Site) -> None:
    asked = ASKED | {"messages": [{"role": "user", "content": "relegate"}]}
    headers = {"x_slackline_verdict": "true", "x_llm_d_slo_ttft_ms": "500"}
    whole = (await at.post("messages", asked, key := new_id(), **headers)).json()
    assert whole["service_tier"] == "flex"
    assert [verdict["relegated"] for verdict in whole["verdicts"]] == [True]
    slo = at.request(key).slo
    assert slo is not None and slo.ttft_s == 0.5
    events = sse((await at.post("messages", asked | {"stream": True}, key, **headers)).text)
    ended = events[-2]
    assert (ended["verdicts"], ended["service_tier"]) == (whole["verdicts"], "flex")
    assert at.fleet.asked.keys() == {f"default.{key}"}, "the second one attached"


async def test_the_key_may_come_as_anthropics_clients_send_it(
    nats_url: str, tmp_path: Path
) -> None:
    key = keys_in(tmp_path / "keys", "acme")["acme"]
    async with site(nats_url, keys=str(tmp_path / "keys")) as at:
        answer = await at.post("messages", ASKED, x_api_key=key)
        assert answer.status_code == 200
        assert {name.partition(".")[0] for name in at.fleet.asked} == {"acme"}
        for headers in ({}, {"x_api_key": "wrong"}):
            answer = await at.post("messages", ASKED, **headers)
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (401, "authentication_error")
