"""The first part of the demonstration: the shipped model answers a few questions.

The part also returns the speed of the engine on this machine.
"""

import time

from rich.console import Console

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.connection import connected
from loadgen.load.heartbeats import Heartbeats
from loadgen.load.stream import printable, stream
from shared.bus.users import OPERATOR
from shared.client.client import Client, Patience, new_request_id
from shared.clock import Clock
from shared.perf.iteration_time import Profile
from shared.schemas import GenerateRequest, Sampling

# (tier of the default set, question). The model knows only a little of its training texts.
QUESTIONS = (
    ("interactive", "What is a river?"),
    ("chat", "What does it mean to wander?"),
    ("summary", "Tell me about the horse."),
)
SAMPLING = Sampling(max_tokens=160, temperature=0.5, top_p=0.9, seed=1)


def spec() -> FleetSpec:
    return FleetSpec(replicas=1, engine="torch", gateway=False, drain_s=2.0)


async def answer(fleet: Fleet, console: Console) -> Profile:
    """Asks each question in turn. Returns the profile that the worker measured.

    Raises SlacklineError if a stream breaks, or no worker is heard.
    """
    heartbeats = Heartbeats()
    async with connected(fleet.access(), "slackline-demo", OPERATOR, Clock(), Patience()) as client:
        await heartbeats.listen(client.bus)
        for tier, question in QUESTIONS:
            await _ask(client, console, tier, question)
        return await heartbeats.profile()


async def _ask(client: Client, console: Console, tier: str, question: str) -> None:
    console.print(f"\n[bold]{tier}[/]: {question}")
    request = GenerateRequest(
        request_id=new_request_id(),
        messages=[{"role": "user", "content": question}],
        sampling=SAMPLING,
    )
    began_s = time.monotonic()

    def show(text: str) -> None:
        console.print(printable(text), end="", markup=False, soft_wrap=True)

    answer = await stream(await client.submit(request, tier), began_s, show)
    console.print(f"\n[dim]{answer.in_words}[/]")
