"""The second part of the demonstration: two fleets serve one rush, each under its own policy."""

import asyncio
import time
from collections.abc import Sequence

from msgspec import Struct
from rich.console import Console

from loadgen.bench.machine import cpu_s
from loadgen.demo.prompts import Prompts
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.arrivals import draw_arrivals, parse_gaps, parse_profile
from loadgen.load.connection import LOAD_PATIENCE, connected
from loadgen.load.heartbeats import Heartbeats
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.open_loop import run_load
from loadgen.load.progress import progress
from loadgen.load.report import Report, make_report, seconds, spread
from loadgen.load.send_nats import NatsSender
from loadgen.load.tally import Tally
from loadgen.load.workload import named_workload
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.rules.tiers import load_tiers

TIERS, BURSTS = "demo-3", "demo"
WORKLOAD, CONTEXT_TOKENS = "short-mix", 4096
# Beyond these limits the figures say more about the machine than about the policies.
IDLE_LIMIT, LATENESS_LIMIT_S = 0.03, 0.2
STEADY_DECODES = 32  # in an iteration at capacity, beside a chunk of prefill


class Rush(Struct, frozen=True, kw_only=True):
    """The load that is offered, and the fleet that serves it under any policy."""

    fleet: FleetSpec
    rate: float  # requests/s, the mean over the bursts
    duration_s: float
    seed: int
    wait_s: float  # for requests that still run after the last arrival

    def requests(self) -> list[PlannedRequest]:
        """The plan of the rush. It is the same at every call."""
        arrivals = draw_arrivals(
            parse_gaps("poisson"),
            self.rate,
            self.duration_s,
            self.seed,
            parse_profile(BURSTS, self.duration_s),
        )
        lengths = named_workload(WORKLOAD, CONTEXT_TOKENS)
        return plan_requests(arrivals, lengths, load_tiers(TIERS), self.seed)


def capacity_per_s(profile: Profile, requests: Sequence[PlannedRequest]) -> float:
    """The number of requests like these that one replica can serve per second.

    At that rate every iteration has STEADY_DECODES decodes and as large a chunk of prefill as
    replaces the requests that end.
    """
    prompt = sum(request.prompt_tokens for request in requests) / len(requests)
    # per request
    iterations = sum(request.output_tokens for request in requests) / len(requests) / STEADY_DECODES
    decodes = BatchShape(decodes=STEADY_DECODES, decode_context=int(STEADY_DECODES * prompt))
    return 1 / (
        iterations * profile.batch_s(decodes.with_chunk(int(prompt / iterations), int(prompt / 2)))
    )


async def serve(
    fleet: Fleet,
    label: str,
    rush: Rush,
    requests: list[PlannedRequest],
    prompts: Prompts | None,
    command: str,
    console: Console,
) -> Report:
    """Offers the rush to this fleet and shows progress."""
    clock, tiers, stop = Clock(), load_tiers(TIERS), asyncio.Event()
    tally, heartbeats = Tally(tiers), Heartbeats()
    async with connected(
        fleet.access(), "slackline-demo", OPERATOR, clock, LOAD_PATIENCE
    ) as client:
        await heartbeats.listen(client.bus)
        longest = max(request.output_tokens for request in requests)
        sender = NatsSender(
            client,
            clock,
            seed=rush.seed,
            longest_output=longest,
            context_tokens=CONTEXT_TOKENS,
            prompts=prompts.ids if prompts is not None else None,
        )
        began_s, used_s = time.monotonic(), _cpu_s(fleet)
        async with progress(tally, len(requests), rush.duration_s, label, console):
            await run_load(requests, sender, tally, clock, stop, rush.wait_s)
        took_s = time.monotonic() - began_s
        cores = (_cpu_s(fleet) - used_s) / took_s
        engines = await heartbeats.spent()
    busy = engines.exec_s / (took_s * rush.fleet.replicas)
    waited = engines.idle_s / (engines.exec_s + engines.idle_s) if engines.exec_s else 0.0
    late_s = spread([outcome.lateness_s for outcome in tally.outcomes]).p99_s or 0.0
    machine = (
        f"{took_s:.0f} s until the last answer; engines computed {100 * busy:.0f} % of it "
        f"and waited {100 * waited:.1f} % for plans; "
        f"99 % of the requests were sent at most {seconds(late_s)} late; "
        f"the fleet used {cores:.2f} cores"
    )
    notes = [machine]
    if rush.fleet.engine != "sim" and (waited > IDLE_LIMIT or late_s > LATENESS_LIMIT_S):
        notes.append(
            "this machine was too busy with other work: run the demonstration again when it is idle"
        )
    return make_report(
        tally,
        label=label,
        command=command,
        transport="nats",
        seed=rush.seed,
        planned=len(requests),
        offered_s=rush.duration_s,
        notes=notes,
        engines=engines,
    )


def _cpu_s(fleet: Fleet) -> float:
    return sum(cpu_s(child.pid) or 0.0 for child in fleet.processes if child.pid is not None)
