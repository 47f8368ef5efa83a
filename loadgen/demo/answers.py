"""The demonstration's first part: a few prompts on the torch engine, their tokens shown as they come."""

import time

from rich.console import Console

from loadgen.commands.connection import connected
from loadgen.fleet import Fleet, FleetSpec
from shared.client import Client, Patience, new_request_id
from shared.clock import Clock
from shared.schemas import Delta, GenerateRequest, Sampling

# (tier of the default set, prompt). The model's weights are random: what it says is too.
PROMPTS = (("interactive", "Why is the sky blue?"), ("chat", "Write a haiku about slack."), ("summary", "Explain NATS to a five-year-old."))
MAX_TOKENS = 48


def spec() -> FleetSpec:
    return FleetSpec(replicas=1, policy="qoserve", engine="torch", gateway=False, drain_s=2.0)


async def answer(fleet: Fleet, console: Console) -> None:
    """Each prompt in turn. Raises SlacklineError if a stream breaks."""
    async with connected(fleet.url, "slackline-demo", Clock(), Patience()) as client:
        for number, (tier, prompt) in enumerate(PROMPTS):
            await _one(client, console, tier, prompt, seed=number)


async def _one(client: Client, console: Console, tier: str, prompt: str, seed: int) -> None:
    console.print(f"\n[bold]{tier}[/]: {prompt}", highlight=False)
    request = GenerateRequest(
        request_id=new_request_id(), prompt=prompt, sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)
    )
    began_s = time.monotonic()
    first_s, tokens = 0.0, 0
    handle = await client.submit(request, tier)
    try:
        async for event in handle:
            if isinstance(event, Delta):
                first_s = first_s or time.monotonic()
                tokens += len(event.tokens)
                console.print(_plain(event.text), end="", markup=False, highlight=False, soft_wrap=True)
    except BaseException:
        await handle.cancel("the demonstration stopped")
        raise
    verdict, ended_s = await handle.wait(), time.monotonic()
    pace = f", then {(tokens - 1) / (ended_s - first_s):.0f}/s" if tokens > 1 else ""
    kept = "SLO met" if verdict.slo_met else "SLO missed"
    console.print(f"\n[dim]{tokens} tokens, the first after {1000 * (first_s - began_s):.0f} ms{pace}; {kept}[/]", highlight=False)


def _plain(text: str) -> str:
    """Random tokens may hold anything, control characters for the terminal too."""
    return "".join(c if c.isprintable() else " " for c in text)
