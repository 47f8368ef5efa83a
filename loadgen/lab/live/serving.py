"""A system serves the load live: a policy on a fleet of one replica, or vLLM alone."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.lab.live.iterations import Followed
from loadgen.lab.live.load import Questions, RisingLoad
from loadgen.lab.live.prediction import acceptance_of, foretell, measured
from loadgen.lab.live.rows import Row, attained, phases
from loadgen.load.connection import LOAD_PATIENCE, connected
from loadgen.load.heartbeats import Heartbeats
from loadgen.load.mix import PlannedRequest
from loadgen.load.open_loop import Sender, run_load
from loadgen.load.progress import progress
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Outcome, Tally
from loadgen.trials.comparison import Contestant
from loadgen.trials.figures_table import named
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.models import shipped as models
from shared.vocabulary import FinishReason

WAIT_S = 60.0  # for what still runs after the last arrival
KV_BLOCKS, CONTEXT_TOKENS, SLOTS = 2048, 2048, 256
VLLM_KV_BLOCKS, VLLM_BLOCK_TOKENS = KV_BLOCKS // 2, 32  # as the worker has them on a CPU
VLLM_DRAFTS = 5  # the most of a request and iteration on vLLM
THREADS = 1  # of the engine, whatever the caller's OMP_NUM_THREADS says
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads are those of OMP_NUM_THREADS
    "OMP_NUM_THREADS": str(THREADS),
}
# vLLM serves the lowest number first: the tightest pace.
PRIORITIES: Mapping[str, int] = {"tight": 0, "medium": 1, "loose": 2}
ALONE, BY_PRIORITY = "vLLM alone", "vLLM alone, by priority"


class System(NamedTuple):
    """An engine, torch or vllm, and its pair of models, shipped ones or folders."""

    engine: str
    model: str = models.DEFAULT
    draft_model: str = models.DRAFTS[models.DEFAULT]


def fleet_spec(contestant: Contestant, system: System, tiers: Path) -> FleetSpec:
    """One replica."""
    engine, model, draft_model = system
    vllm: dict[str, Any] = {}
    if engine == "vllm":
        vllm = {"max_model_len": CONTEXT_TOKENS}
        if draft_model != "none":
            vllm["speculative_config"] = {
                "method": "draft_model",
                "model": str(models.folder(draft_model)),
                "num_speculative_tokens": VLLM_DRAFTS,
            }
        model, draft_model = str(models.folder(model)), ""
    blocks = VLLM_KV_BLOCKS if engine == "vllm" else KV_BLOCKS
    return FleetSpec(
        replicas=1,
        policy=contestant.policy,
        settings=contestant.settings,
        engine=engine,
        model=model,
        draft_model=draft_model,
        vllm=vllm,
        tiers=str(tiers),
        gateway=False,
        drain_s=2.0,
        environment={
            "SLACKLINE_WORKER_KV_BLOCKS": str(blocks),
            "SLACKLINE_WORKER_MAX_SLOTS": str(SLOTS),
            "OMP_NUM_THREADS": str(THREADS),
        },
    )


async def serve(
    contestant: Contestant,
    system: System,
    load: RisingLoad,
    prompts: Questions,
    acceptance: float | None,
    console: Console,
) -> tuple[Row, float | None]:
    """The row, and the acceptance that its own iterations show. Then the simulator serves the same
    requests, with what was measured and with this acceptance.
    """
    requests, followed = load.requests(prompts), Followed(chains=system.engine == "vllm")
    clock, name = Clock(), named(*contestant)
    with tempfile.TemporaryDirectory(prefix="slackline-") as folder:
        tiers = Path(folder) / "tiers.json"
        tiers.write_bytes(msgspec.json.encode(load.tiers))
        async with (
            Fleet(fleet_spec(contestant, system, tiers), console.print) as fleet,
            connected(fleet.access(), "slackline-bench", OPERATOR, clock, LOAD_PATIENCE) as client,
            fleet.connect("slackline-observer") as observer,
        ):
            heartbeats = Heartbeats()
            await heartbeats.listen(client.bus)
            await followed.listen(observer, fleet.replicas[0])
            facts = (await heartbeats.workers())[fleet.replicas[0]]
            sender = NatsSender(
                client,
                clock,
                seed=load.seed,
                longest_output=max(request.output_tokens for request in requests),
                context_tokens=facts.context_tokens,
                prompts=lambda planned: prompts.of(planned.number),
            )
            tally, took_s = await offer(requests, sender, load, name, console)
        found = measured(followed.iterations, facts, acceptance)
        result = foretell(contestant, requests, load.tiers, load.seed, facts, found, Path(folder))
    told = [verdict is not None and verdict.slo_met for verdict in result.verdicts]
    row = Row(
        name=f"{name} on vLLM" if system.engine == "vllm" else name,
        seed=load.seed,
        requests=len(requests),
        took_s=took_s,
        live=attained(load, requests, [bool(outcome.server_met) for outcome in tally.outcomes]),
        simulated=attained(load, requests, told),
        phases=phases(followed.iterations),
        cost=found.draft,
    )
    return row, acceptance_of(followed.iterations)


async def offer(
    requests: list[PlannedRequest], sender: Sender, load: RisingLoad, name: str, console: Console
) -> tuple[Tally, float]:
    """Offers the load and shows progress. Returns the outcomes and the seconds they took."""
    tally, clock, stop = Tally(load.tiers), Clock(), asyncio.Event()
    began_unix_s = clock.unix_s()
    async with progress(tally, len(requests), load.duration_s, name, console):
        await run_load(requests, sender, tally, clock, stop, WAIT_S)
    last_unix_s = max((o.measure.last_unix_s for o in tally.outcomes), default=began_unix_s)
    return tally, max(0.0, last_unix_s - began_unix_s)


class VllmSender:
    """Sends each request to `AsyncLLM.generate`. Answers have the length of the plan."""

    def __init__(
        self, engine: Any, clock: Clock, prompts: Callable[[int], list[int]], *, by_priority: bool
    ) -> None:
        self._engine, self._clock, self._prompts = engine, clock, prompts
        self._by_priority = by_priority

    async def send(self, outcome: Outcome) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        planned = outcome.planned
        params = SamplingParams(
            temperature=0.0,
            max_tokens=planned.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        priority = PRIORITIES[planned.tier] if self._by_priority else 0
        prompt = {"prompt_token_ids": self._prompts(planned.number)}
        async for output in self._engine.generate(
            prompt, params, f"load-{planned.number}", priority=priority
        ):
            tokens = sum(len(part.token_ids) for part in output.outputs)
            outcome.emit(tokens, self._clock.unix_s())
        outcome.end(FinishReason.LENGTH)


async def serve_alone(
    name: str, system: System, load: RisingLoad, prompts: Questions, console: Console
) -> Row:
    """vLLM as an operator runs it on a CPU: its own scheduler, and an engine core in a process of
    its own. It has as much KV as behind Slackline, and no draft model.
    """
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    requests = load.requests(prompts)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(models.folder(system.model)),
            disable_log_stats=True,
            max_model_len=CONTEXT_TOKENS,
            num_gpu_blocks_override=VLLM_KV_BLOCKS + 1,
            block_size=VLLM_BLOCK_TOKENS,
            dtype="float32",
            max_num_seqs=SLOTS,
            scheduling_policy="priority" if name == BY_PRIORITY else "fcfs",
        )
    )
    try:
        sender = VllmSender(engine, Clock(), prompts.of, by_priority=name == BY_PRIORITY)
        tally, took_s = await offer(requests, sender, load, name, console)
    finally:
        engine.shutdown()
    met = [outcome.met for outcome in tally.outcomes]
    return Row(
        name=name,
        seed=load.seed,
        requests=len(requests),
        took_s=took_s,
        live=attained(load, requests, met),
    )
