"""The demonstration's first part: a few questions to the shipped model, its words shown as they
come; and how fast it is here.
"""

import asyncio
import time

from rich.console import Console

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.connection import connected
from loadgen.load.stream import printable, stream
from shared import subjects
from shared.bus.api import Call
from shared.client.client import Client, Patience, new_request_id
from shared.clock import Clock
from shared.core.announced import profile_of
from shared.perf.iteration_time import Profile
from shared.schemas import Announce, GenerateRequest, Sampling

# (tier of the default set, question). The model knows what its training texts say, and little of
# that.
QUESTIONS = (
    ("interactive", "What is a river?"),
    ("chat", "What does it mean to wander?"),
    ("summary", "Tell me about the horse."),
)
SAMPLING = Sampling(max_tokens=160, temperature=0.5, top_p=0.9, seed=1)
HEARD_WITHIN_S = 5.0


def spec() -> FleetSpec:
    return FleetSpec(replicas=1, policy="qoserve", engine="torch", gateway=False, drain_s=2.0)


async def answer(fleet: Fleet, console: Console) -> Profile:
    """Each question in turn; what the worker measured of itself. Raises SlacklineError if a stream
    breaks.
    """
    heard: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

    def hear(announce: Announce, _: Call) -> None:
        if not heard.done():
            heard.set_result(announce)

    async with connected(fleet.url, "slackline-demo", Clock(), Patience()) as client:
        await client.bus.subscribe(subjects.ANNOUNCEMENTS, Announce, hear)
        for tier, question in QUESTIONS:
            await _one(client, console, tier, question)
        return profile_of(await asyncio.wait_for(heard, HEARD_WITHIN_S))


async def _one(client: Client, console: Console, tier: str, question: str) -> None:
    console.print(f"\n[bold]{tier}[/]: {question}", highlight=False)
    request = GenerateRequest(
        request_id=new_request_id(),
        messages=[{"role": "user", "content": question}],
        sampling=SAMPLING,
    )
    began_s = time.monotonic()

    def show(text: str) -> None:
        console.print(printable(text), end="", markup=False, highlight=False, soft_wrap=True)

    answer = await stream(await client.submit(request, tier), began_s, show)
    console.print(f"\n[dim]{answer.in_words}[/]", highlight=False)
