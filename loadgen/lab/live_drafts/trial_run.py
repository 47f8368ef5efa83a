"""One policy serves the load live; then the simulator serves it with what was measured."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from rich.console import Console

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.lab.live_drafts.followed import Followed, Iteration
from loadgen.lab.live_drafts.foretold import Measured, acceptance_of, foretell, measured
from loadgen.lab.live_drafts.rising_load import Questions, RisingLoad
from loadgen.lab.live_drafts.worth import Band, Phases, bands, phases
from loadgen.load.connection import LOAD_PATIENCE, connected
from loadgen.load.mix import PlannedRequest
from loadgen.load.open_loop import run_load
from loadgen.load.progress import progress
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Tally
from loadgen.simulator.simulation import SimulationResult
from loadgen.trials.comparison import Contestant
from shared import subjects
from shared.bus.api import Call
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.models import shipped as models
from shared.perf.draft import DraftCost
from shared.perf.profile_file import ProfileFile
from shared.schemas import Announce

ANNOUNCED_WITHIN_S = 5.0
WAIT_S = 60.0  # for what still runs after the last arrival
KV_BLOCKS, BLOCK_TOKENS = 2048, 16
VLLM_DRAFTS = 5  # the most of a request and iteration on vLLM
THREADS = 1  # of the engine, whatever the caller's OMP_NUM_THREADS says


class Attained(Struct, frozen=True, kw_only=True):
    """Fractions of the offered requests that kept their SLO, by the server's verdicts."""

    met: float
    by_tier: dict[str, float]
    by_stage: list[float]
    goodput_tokens_per_s: float  # of the outputs of these requests, per second of arrivals
    tokens_per_verification: float | None


class Row(Struct, frozen=True, kw_only=True):
    """One turn of a policy."""

    engine: str
    policy: str
    settings: dict[str, str]
    seed: int  # of the load
    requests: int
    live: Attained
    simulated: Attained
    verifying: Phases
    plain: Phases  # iterations with decodes and without drafts
    bands: list[Band]
    announced: DraftCost
    cost: DraftCost  # as measured
    acceptance: float
    # what the simulator was given beside these, so that it can serve the same again
    announced_profile: ProfileFile | None
    served_profile: ProfileFile
    scatter: dict[int, list[float]]  # by size
    profile_error: float | None  # relative, of the fit to its iterations
    times: float  # what the iterations took together, over what the fit says
    late_s: float  # the longest time by which a request was sent too late
    threads: int | None = None  # of the engine; None: not recorded

    @property
    def policy_with_settings(self) -> str:
        settings = ",".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.policy}:{settings}" if settings else self.policy

    @property
    def name(self) -> str:
        return f"{self.policy_with_settings}{self.on_engine}"

    @property
    def on_engine(self) -> str:
        """The engine, where it is not the torch engine."""
        return " on vLLM" if self.engine == "vllm" else ""


def attained(
    load: RisingLoad,
    requests: Sequence[PlannedRequest],
    met: Sequence[bool],
    tokens_per_verification: float | None,
) -> Attained:
    """`met` runs along the requests."""

    def fraction(among: Sequence[bool]) -> float:
        return fmean(among) if among else 1.0

    both = list(zip(requests, met, strict=True))
    return Attained(
        met=fraction(met),
        by_tier={
            tier: fraction([good for request, good in both if request.tier == tier])
            for tier in load.tiers.tiers
        },
        by_stage=[
            fraction([good for request, good in both if load.stage(request) == stage])
            for stage in range(len(load.rates_per_s))
        ],
        goodput_tokens_per_s=sum(request.output_tokens for request, good in both if good)
        / load.duration_s,
        tokens_per_verification=tokens_per_verification,
    )


def per_verification(verifications: int, accepted: int) -> float | None:
    return 1 + accepted / verifications if verifications else None


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
        vllm = {
            "speculative_config": {
                "method": "draft_model",
                "model": str(models.folder(draft_model)),
                "num_speculative_tokens": VLLM_DRAFTS,
            },
            "max_model_len": 2048,
        }
        model, draft_model = str(models.folder(model)), ""
    environment: Mapping[str, str] = {
        "SLACKLINE_WORKER_KV_BLOCKS": str(KV_BLOCKS if engine != "vllm" else KV_BLOCKS // 2),
        "SLACKLINE_WORKER_MAX_SLOTS": "256",
        "OMP_NUM_THREADS": str(THREADS),
    }
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
        environment=environment,
    )


async def serve(
    contestant: Contestant,
    system: System,
    load: RisingLoad,
    prompts: Questions,
    acceptance: float | None,
    console: Console,
) -> tuple[Row, float | None]:
    """The row, and the acceptance that its own iterations show."""
    requests, clock, stop = load.requests(prompts), Clock(), asyncio.Event()
    tally, followed = Tally(load.tiers), Followed(chains=system.engine == "vllm")
    with tempfile.TemporaryDirectory(prefix="slackline-") as folder:
        tiers = Path(folder) / "tiers.json"
        tiers.write_bytes(msgspec.json.encode(load.tiers))
        async with (
            Fleet(fleet_spec(contestant, system, tiers), console.print) as fleet,
            connected(fleet.access(), "slackline-bench", OPERATOR, clock, LOAD_PATIENCE) as client,
            fleet.connect("slackline-observer") as observer,
        ):
            announced: asyncio.Future[Announce] = asyncio.get_running_loop().create_future()

            def on_announce(announce: Announce, _: Call) -> None:
                if not announced.done():
                    announced.set_result(announce)

            await client.bus.subscribe(subjects.ANNOUNCEMENTS, Announce, on_announce)
            await followed.listen(observer, fleet.replicas[0])
            facts = await asyncio.wait_for(announced, ANNOUNCED_WITHIN_S)
            sender = NatsSender(
                client,
                clock,
                seed=load.seed,
                longest_output=max(request.output_tokens for request in requests),
                context_tokens=facts.context_tokens,
                prompts=lambda planned: prompts.of(planned.number),
            )
            label = f"{contestant.policy} {dict(contestant.settings) or ''}".strip()
            async with progress(tally, len(requests), load.duration_s, label, console):
                await run_load(requests, sender, tally, clock, stop, WAIT_S)
        met = [bool(outcome.server_met) for outcome in tally.outcomes]
        own = acceptance_of(followed.iterations)
        found = measured(followed.iterations, facts, acceptance)
        result = foretell(contestant, requests, load.tiers, load.seed, facts, found, Path(folder))
    late_s = max((outcome.lateness_s for outcome in tally.outcomes), default=0.0)
    row = row_of(
        contestant,
        system.engine,
        load,
        requests,
        met,
        followed.iterations,
        facts,
        found,
        result,
        late_s,
    )
    return row, own


def row_of(
    contestant: Contestant,
    engine: str,
    load: RisingLoad,
    requests: Sequence[PlannedRequest],
    met: Sequence[bool],
    iterations: Sequence[Iteration],
    facts: Announce,
    found: Measured,
    result: SimulationResult,
    late_s: float,
) -> Row:
    decoding = [one for one in iterations if one.shape.decodes]
    verifications = sum(one.verifications for one in iterations)
    accepted = sum(one.accepted for one in iterations)
    simulated = [verdict is not None and verdict.slo_met for verdict in result.verdicts]
    return Row(
        engine=engine,
        policy=contestant.policy,
        settings=dict(contestant.settings),
        seed=load.seed,
        requests=len(requests),
        live=attained(load, requests, met, per_verification(verifications, accepted)),
        simulated=attained(
            load, requests, simulated, per_verification(result.verifications, result.accepted)
        ),
        verifying=phases([one for one in decoding if one.drafted]),
        plain=phases([one for one in decoding if not one.drafted]),
        bands=bands(iterations),
        announced=facts.draft,
        cost=found.draft,
        acceptance=found.acceptance,
        announced_profile=facts.fitted,
        served_profile=found.file,
        scatter={size: [round(each, 3) for each in times] for size, times in found.scatter.items()},
        profile_error=found.file.error.mape,
        times=found.times,
        late_s=late_s,
        threads=THREADS,
    )
