"""The number of replicas that one planner drives while their engines hardly wait, and two."""

import asyncio
from random import Random
from typing import NamedTuple

from loadgen.bench.figure import Figure
from loadgen.bench.lone_services import lone_services
from loadgen.bench.stand_in_replicas import DECODES, ITERATION_S, StandInReplicas, Waits
from loadgen.fleet.child import Say
from shared.clock import Clock

PART = "scale, planner"
WAIT_LIMIT, LEAST = 0.01, 64
RUNGS, QUICK_RUNGS = (16, 32, 48, 64, 96, 128, 192, 256), (2, 4)
MEASURE_S, QUICK_S = 5.0, 1.0
SETTLE_S = 1.0  # after the last replica was leased
LEASES = {"SLACKLINE_PLANNER_MAX_REPLICAS": str(max(RUNGS))}


class Rung(NamedTuple):
    """Measured with so many replicas; `cpu_s` is the planners' for one iteration."""

    replicas: int
    waits: Waits
    cpu_s: float

    @property
    def note(self) -> str:
        mean_s = self.waits.total_s / max(self.waits.iterations, 1)
        return (
            f"{self.replicas} waited {self.waits.share:.2%}, "
            f"{1e3 * mean_s:.1f} ms an iteration, CPU {1e3 * self.cpu_s:.2f} ms"
        )


async def measure(quick: bool, rng: Random, say: Say) -> list[Figure]:
    return [
        *await _with_planners(1, quick, rng, say),
        *await _with_planners(2, quick, rng, say),
    ]


async def _with_planners(planners: int, quick: bool, rng: Random, say: Say) -> list[Figure]:
    rungs: list[Rung] = []
    clock = Clock()
    async with lone_services([], say) as services:
        for _ in range(planners):
            await services.start("planner", LEASES)
        async with StandInReplicas(services.bus, clock, rng) as replicas:
            for count in QUICK_RUNGS if quick else RUNGS:
                await replicas.grow(count)
                await asyncio.sleep(SETTLE_S)
                began_cpu_s = services.cpu_s()
                waits = await replicas.watch(QUICK_S if quick else MEASURE_S)
                cpu_s = (services.cpu_s() - began_cpu_s) / max(waits.iterations, 1)
                rungs.append(Rung(count, waits, cpu_s))
                say(f"  {planners} x planner, {rungs[-1].note}")
                if waits.share > WAIT_LIMIT:
                    break
    driven = [rung for rung in rungs if rung.waits.share <= WAIT_LIMIT]
    best = driven[-1] if driven else rungs[0]
    name = f"{planners} of them: " if planners > 1 else ""
    least = LEAST if planners == 1 else None
    return [
        Figure(
            part=PART,
            name=f"{name}replicas whose engines wait at most {WAIT_LIMIT:.0%}",
            value=best.replicas if driven else 0,
            unit="",
            least=None if quick else least,  # it tries fewer than that
            note="; ".join(rung.note for rung in rungs[-2:]),
        ),
        Figure(
            part=PART,
            name=f"{name}CPU of an iteration of {DECODES} requests",
            value=best.cpu_s,
            unit="ms",
        ),
        Figure(
            part=PART,
            name=f"{name}replicas of a core, by that CPU, at {1e3 * ITERATION_S:.0f} ms",
            value=ITERATION_S / best.cpu_s if best.cpu_s else None,
            unit="",
            least=least,
        ),
    ]
