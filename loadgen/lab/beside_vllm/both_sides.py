"""The two sides that are compared: the same model, KV cache and limits in vLLM and in Slackline."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.demo.prompts import Prompts
from loadgen.demo.rush import BURSTS, TIERS
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.lab.beside_vllm import sized_llama as model
from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.open_loop import Sender, run_load
from loadgen.load.progress import progress
from loadgen.load.tally import Tally
from loadgen.load.workload import named_workload
from shared import subjects
from shared.bus.api import Bus, Call, Subscription
from shared.clock import Clock
from shared.models import shipped as models
from shared.rules.tiers import load_tiers
from shared.schemas import PlanAck
from shared.text.tokenizer import Tokenizer

WORKLOAD = "short-mix"
KV_BLOCKS, BLOCK_TOKENS, MAX_NUM_SEQS, BATCHED_TOKENS = 1024, 32, 128, 2048
ALONE = "vLLM"


@dataclass(frozen=True, slots=True)
class Bench:
    """The configuration of both sides, and the requests that they serve."""

    folder: Path  # of the model
    seed: int
    duration_s: float  # of the bursts
    requests: int  # of a saturated run
    repeats: int
    together: int  # requests of a saturated run in flight
    console: Console

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of vLLM that both sides share."""
        return model.ARGUMENTS | {
            "max_model_len": model.CONTEXT_TOKENS,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "enforce_eager": True,
        }

    @property
    def alone(self) -> dict[str, Any]:
        """The arguments of vLLM alone."""
        kv = {
            "num_gpu_blocks_override": KV_BLOCKS + 1,
            "block_size": BLOCK_TOKENS,
            "max_num_seqs": MAX_NUM_SEQS,
            "dtype": "float32",
        }
        return self.arguments | kv

    def spec(self, policy: str, settings: Mapping[str, str]) -> FleetSpec:
        """The fleet in which Slackline plans vLLM."""
        kv = {"KV_BLOCKS": KV_BLOCKS, "BLOCK_TOKENS": BLOCK_TOKENS, "MAX_SLOTS": 1024}
        return FleetSpec(
            replicas=1,
            policy=policy,
            settings=settings,
            engine="vllm",
            model=str(self.folder),
            vllm=self.arguments,
            tiers=TIERS,
            gateway=False,
            environment={f"SLACKLINE_WORKER_{name}": str(value) for name, value in kv.items()},
        )

    def bursts(self, rate: float) -> list[PlannedRequest]:
        """Requests of three tiers that arrive in bursts."""
        arrivals = draw_arrivals(
            parse_gaps("poisson"),
            rate,
            self.duration_s,
            self.seed,
            parse_profile(BURSTS, self.duration_s),
        )
        return plan_requests(
            arrivals, named_workload(WORKLOAD, model.CONTEXT_TOKENS), load_tiers(TIERS), self.seed
        )

    def at_once(self) -> list[PlannedRequest]:
        """Requests that all arrive at the beginning."""
        workload = named_workload(WORKLOAD, model.CONTEXT_TOKENS)
        return plan_requests([0.0] * self.requests, workload, load_tiers(TIERS), self.seed)

    def prompts(self, seed: int) -> Prompts:
        return Prompts(Tokenizer.load(models.folder(models.DEFAULT)), seed)

    async def offer(
        self, plan: Sequence[PlannedRequest], sender: Sender, label: str, wait_s: float
    ) -> tuple[Tally, float]:
        """Offers the plan and shows progress. Returns the outcomes and the seconds they took."""
        tally, clock, stop = Tally(load_tiers(TIERS)), Clock(), asyncio.Event()
        began_unix_s = clock.unix_s()
        async with progress(tally, len(plan), max(self.duration_s, 1.0), label, self.console):
            await run_load(plan, sender, tally, clock, stop, wait_s)
        last_unix_s = max(
            (outcome.measure.last_unix_s for outcome in tally.outcomes), default=began_unix_s
        )
        return tally, last_unix_s - began_unix_s


class Iterations:
    """The iterations of a fleet's only replica while it has work, in seconds, from its acks.

    `between_s` is the time neither in the engine nor waiting for a plan. It includes the way to the
    engine's thread and back.
    """

    def __init__(self) -> None:
        self.iterations = 0
        self.exec_s = self.outside_s = self.idle_s = self.between_s = 0.0
        self._ended_unix_s = 0.0
        self._subscription: Subscription | None = None

    async def listen(self, bus: Bus, fleet: Fleet) -> None:
        subject = subjects.acked(fleet.replicas[0])
        self._subscription = await bus.subscribe(subject, PlanAck, self._on_ack)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.stop()

    def _on_ack(self, ack: PlanAck, _: Call) -> None:
        if not (ack.plan_seq and ack.slots):
            return
        self.iterations += 1
        self.exec_s += ack.exec_s
        self.outside_s += ack.outside_s
        self.idle_s += ack.idle_s
        if self._ended_unix_s:
            self.between_s += ack.ended_unix_s - self._ended_unix_s - ack.exec_s - ack.idle_s
        self._ended_unix_s = ack.ended_unix_s
