"""The script by which the API tests' engine answers questions about the weather, and the OpenAI
clients of such a fleet.
"""

import json
from typing import Any

import openai

from loadgen.fleet.fleet import Fleet
from tests.fleet.live import WAIT_S

ASKS = "How warm is it in Oslo and Rome?"
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "temperature", "description": "In °C.", "parameters": CITY},
    {"name": "now"},
]
CALLS = [{"name": "temperature", "arguments": {"city": city}} for city in ("Oslo", "Rome")]
WARMTH = {"Oslo": "4", "Rome": "19"}
ANSWER = "It is 4 °C in Oslo, and 19 °C in Rome."
# the rules in order: the results are in the prompt, one city is asked for, tools are there at all,
# instructions are
SCRIPT = [
    {"prompt": "The function returned: 19", "say": ANSWER},
    {"prompt": "only Rome", "say": json.dumps(CALLS[1])},
    {"prompt": "You may call these functions", "say": json.dumps(CALLS)},
    {"prompt": "Speak Latin", "say": "Salve."},
    {"prompt": "nothing", "say": ""},
    {"say": "I cannot know."},
]


def client_of(fleet: Fleet, key: str = "none", max_retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{fleet.http_url}/v1", api_key=key, max_retries=max_retries, timeout=WAIT_S
    )


async def model_of(client: openai.AsyncOpenAI) -> str:
    return (await client.models.list()).data[0].id
