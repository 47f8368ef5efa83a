"""A client for test_clients.py: the anthropic package calls tools, whole and streamed, and counts
tokens. Arguments: BASE_URL MODEL, the former with /v1.
"""

import sys
from contextlib import suppress
from typing import Any

import anthropic

BASE_URL, MODEL = sys.argv[1:]
WARMTH = {"Oslo": "4", "Rome": "19"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"name": "temperature", "description": "In °C.", "input_schema": PARAMETERS},
    {"type": "web_search_20250305", "name": "web_search"},
]
ASKS = {"role": "user", "content": "How warm is it in Oslo and Rome?"}
client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="none", max_retries=0)


def loop(*, streamed: bool) -> str:
    """Ask, call the tools, and ask again until there is an answer."""
    messages: list[Any] = [ASKS]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "tools": TOOLS}
    for _ in range(3):
        if streamed:
            with client.messages.stream(messages=messages, **asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **asked)
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            assert answer.stop_reason == "end_turn", answer
            return "".join(block.text for block in answer.content if block.type == "text")
        assert answer.stop_reason == "tool_use", answer
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": c.id, "content": WARMTH[c.input["city"]]}
            for c in calls
        ]
        messages.append({"role": "user", "content": results})
    raise AssertionError("the loop did not end")


for streamed in (False, True):
    said = loop(streamed=streamed)
    assert said == "It is 4 °C in Oslo, and 19 °C in Rome.", (streamed, said)
counted = client.messages.count_tokens(model=MODEL, messages=[ASKS]).input_tokens
answer = client.messages.create(model=MODEL, max_tokens=400, messages=[ASKS])
assert counted == answer.usage.input_tokens > len(ASKS["content"]), counted
with suppress(anthropic.NotFoundError):
    client.messages.create(model="no-such", max_tokens=1, messages=[ASKS])
    raise AssertionError("an unknown model was served")
print("ok")
