"""A client for test_clients.py: langchain-openai calls tools. Arguments: BASE_URL MODEL."""

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

BASE_URL, MODEL = sys.argv[1:]


@tool
def temperature(city: str) -> str:
    """The temperature in a city, in °C."""
    return {"Oslo": "4", "Rome": "19"}[city]


def loop(model: Any, *, streamed: bool) -> str:
    """Ask, call the tools, and ask again until there is an answer."""
    with_tools = model.bind_tools([temperature])
    messages: list[Any] = [HumanMessage("How warm is it in Oslo and Rome?")]
    for _ in range(3):
        if streamed:
            answer = None
            for chunk in with_tools.stream(messages):
                answer = chunk if answer is None else answer + chunk
        else:
            answer = with_tools.invoke(messages)
        assert answer is not None
        if not answer.tool_calls:
            return str(answer.text)
        messages.append(answer)
        messages += [temperature.invoke(call) for call in answer.tool_calls]
    raise AssertionError("the loop did not end")


for responses in (False, True):
    chat = ChatOpenAI(
        model=MODEL, base_url=BASE_URL, api_key="none", use_responses_api=responses, max_retries=0
    )
    for streamed in (False, True):
        said = loop(chat, streamed=streamed)
        assert said == "It is 4 °C in Oslo, and 19 °C in Rome.", (responses, streamed, said)
print("ok")
