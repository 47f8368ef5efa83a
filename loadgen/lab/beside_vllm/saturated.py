"""All requests at once, under one policy on both sides: the cost of planning vLLM from outside."""

import asyncio
from collections.abc import Sequence
from statistics import median

import msgspec
from rich.table import Table

from loadgen.fleet.fleet import Fleet
from loadgen.lab.beside_vllm import sized_llama as model
from loadgen.lab.beside_vllm.alone import VllmSender, vllm_alone
from loadgen.lab.beside_vllm.both_sides import (
    ALONE,
    BATCHED_TOKENS,
    MAX_NUM_SEQS,
    Bench,
    Iterations,
)
from loadgen.load.connection import LOAD_PATIENCE, connected
from loadgen.load.mix import PlannedRequest
from loadgen.load.open_loop import Sender
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Outcome
from shared.bus.users import OPERATOR
from shared.clock import Clock

PLANNED = "vLLM behind Slackline"
WARM_UP_REQUESTS = 8
WAIT_S = 600.0


class Saturated(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one side. Times are seconds of the whole run."""

    label: str
    tokens: int  # of prompts and outputs
    took_s: float
    tokens_per_s: float
    # behind Slackline only:
    iterations: int | None = None
    exec_s: float | None = None
    outside_s: float | None = None  # part of exec_s: vLLM's scheduling and its books
    idle_s: float | None = None  # waiting for a plan
    between_s: float | None = None  # the rest of the time


async def saturate(bench: Bench, plan: Sequence[PlannedRequest]) -> list[Saturated]:
    """Runs the same requests on either side in turn.

    Both sides stay up throughout, so that a slow moment of the machine affects both.
    """
    runs, clock = list[Saturated](), Clock()
    settings = {"max_num_batched_tokens": str(BATCHED_TOKENS), "max_num_seqs": str(MAX_NUM_SEQS)}
    longest = max(planned.output_tokens for planned in plan)
    tokens = sum(planned.prompt_tokens + planned.output_tokens for planned in plan)
    async with (
        vllm_alone(bench.folder, bench.alone) as engine,
        Fleet(bench.spec("vllm", settings), bench.console.print) as fleet,
        connected(fleet.access(), "slackline-bench", OPERATOR, clock, LOAD_PATIENCE) as client,
    ):
        for repeat in range(-1, bench.repeats):
            warm_up = repeat < 0
            # Each repeat has other prompts: the prefix cache would know those of the last.
            prompts = bench.prompts(bench.seed + 1000 * (repeat + 1)).ids
            offered = plan[:WARM_UP_REQUESTS] if warm_up else plan
            alone = VllmSender(engine, clock, prompts, by_priority=False)
            planned = NatsSender(
                client,
                clock,
                seed=bench.seed,
                longest_output=longest,
                context_tokens=model.CONTEXT_TOKENS,
                prompts=prompts,
            )
            _, alone_s = await bench.offer(
                offered,
                LimitedSender(alone, bench.together),
                "warming up" if warm_up else ALONE,
                WAIT_S,
            )
            engines = Iterations()
            await engines.listen(client.bus, fleet)
            _, planned_s = await bench.offer(
                offered,
                LimitedSender(planned, bench.together),
                "warming up" if warm_up else PLANNED,
                WAIT_S,
            )
            await engines.close()
            if warm_up:
                continue
            runs.append(
                Saturated(label=ALONE, tokens=tokens, took_s=alone_s, tokens_per_s=tokens / alone_s)
            )
            runs.append(
                Saturated(
                    label=PLANNED,
                    tokens=tokens,
                    took_s=planned_s,
                    tokens_per_s=tokens / planned_s,
                    iterations=engines.iterations,
                    exec_s=engines.exec_s,
                    outside_s=engines.outside_s,
                    idle_s=engines.idle_s,
                    between_s=engines.between_s,
                )
            )
    return runs


class LimitedSender:
    """Another sender with at most `together` requests in flight."""

    def __init__(self, sender: Sender, together: int) -> None:
        self._sender, self._room = sender, asyncio.Semaphore(together)

    async def send(self, outcome: Outcome) -> None:
        async with self._room:
            await self._sender.send(outcome)


def saturated_table(runs: Sequence[Saturated]) -> Table:
    """A row for each pair of runs, and at the end the median of their ratios."""
    out = Table(
        title="All requests at once, under the same policy; "
        "milliseconds per iteration behind Slackline",
        title_justify="left",
    )
    for name in (
        "vLLM, tokens/s",
        "behind Slackline",
        "ratio",
        "iterations",
        "in the engine",
        "outside the model",
        "waited for a plan",
        "between",
    ):
        out.add_column(name, justify="right")
    ratios = list[float]()
    for alone, planned in zip(runs[::2], runs[1::2], strict=True):
        ratios.append(planned.tokens_per_s / alone.tokens_per_s)
        parts = (planned.exec_s, planned.outside_s, planned.idle_s, planned.between_s)
        means = (f"{1000 * (part or 0.0) / max(planned.iterations or 1, 1):.2f}" for part in parts)
        out.add_row(
            f"{alone.tokens_per_s:.0f}",
            f"{planned.tokens_per_s:.0f}",
            f"{ratios[-1]:.3f}",
            f"{planned.iterations}",
            *means,
        )
    out.add_section()
    out.add_row("", "median", f"{median(ratios):.3f}", *[""] * 5)
    return out
