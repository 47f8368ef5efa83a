"""A client for test_clients.py: litellm calls tools. Arguments: BASE_URL MODEL."""

import json
import sys
from typing import Any

import litellm

BASE_URL, MODEL = sys.argv[1:]
WARMTH = {"Oslo": "4", "Rome": "19"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "temperature", "description": "In °C.", "parameters": PARAMETERS}
TO: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "none"}


def loop(*, streamed: bool) -> str:
    """Ask, call the tools, and ask again until there is an answer."""
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Oslo and Rome?"}]
    asked: dict[str, Any] = {**TO, "tools": [{"type": "function", "function": FUNCTION}]}
    for _ in range(3):
        answer = litellm.completion(messages=messages, stream=streamed, **asked)
        if streamed:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": WARMTH[city]})
    raise AssertionError("the loop did not end")


for streamed in (False, True):
    said = loop(streamed=streamed)
    assert said == "It is 4 °C in Oslo, and 19 °C in Rome.", (streamed, said)
response = litellm.responses(input="Who are you?", **TO)
assert response.output[0].content[0].text == "Yes.", response
print("ok")
