"""A client for test_clients.py: the openai package calls tools, by both of its APIs. Arguments:
BASE_URL MODEL. Its release is the one that langchain-openai and litellm ask for; the tests of the
fleet have the newest.
"""

import json
import sys
from typing import Any

import openai

BASE_URL, MODEL = sys.argv[1:]
WARMTH = {"Oslo": "4", "Rome": "19"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "temperature", "description": "In °C.", "parameters": PARAMETERS}
ASKS = "How warm is it in Oslo and Rome?"
client = openai.OpenAI(base_url=BASE_URL, api_key="none", max_retries=0)


def by_chats() -> str:
    messages: list[Any] = [{"role": "user", "content": ASKS}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]
    for _ in range(3):
        answer = client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": WARMTH[city]})
    raise AssertionError("the loop did not end")


def by_responses() -> str:
    items: list[Any] = [{"role": "user", "content": ASKS}]
    tools: list[Any] = [{"type": "function", **FUNCTION}]
    for _ in range(3):
        with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
            response = stream.get_final_response()
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            items.append(
                {
                    "type": "function_call",
                    "call_id": call.call_id,
                    "name": call.name,
                    "arguments": call.arguments,
                }
            )
            output = WARMTH[json.loads(call.arguments)["city"]]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
            items.append(result)
    raise AssertionError("the loop did not end")


for loop in (by_chats, by_responses):
    assert loop() == "It is 4 °C in Oslo, and 19 °C in Rome.", loop
print("ok")
