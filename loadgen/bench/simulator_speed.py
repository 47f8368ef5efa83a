"""The speed and memory of the simulator, over the number of running requests and of replicas.

The load is the one on which Vidur (microsoft/vidur) was timed: conversations at 4 requests a
second, one A100, chunks of 512.
"""

import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from loadgen.bench.figure import Figure
from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import QOSERVE_3

PART = "simulator"
PROFILE = "a100-llama3-8b"
RATE_RPS = 4.0
CONTEXT_TOKENS = 8192
AIM_REQUESTS_PER_S = 4000.0
AIM_MEMORY_BYTES = 300e6
RUNNING = (16, 64, 256, 1024)
REPLICAS = (1, 4, 16, 64)
STEPS = 200  # decode iterations of each running request


def measure(requests: int, seed: int) -> list[Figure]:
    """Simulates `requests` on one replica, and as many in total on each larger fleet."""
    # in a process of its own, so that the peak of its memory is that of this run
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        rates, memory_bytes = alone.submit(_one_replica, requests, seed).result()
    figures = [
        Figure(
            part=PART,
            name=name,
            value=rate,
            unit="",
            least=AIM_REQUESTS_PER_S,
            note="requests/s of wall clock",
        )
        for name, rate in rates.items()
    ]
    figures.append(
        Figure(
            part=PART,
            name="peak memory of a run",
            value=memory_bytes,
            unit="MB",
            aim=AIM_MEMORY_BYTES,
            note=f"{requests} requests",
        )
    )
    figures += [
        Figure(
            part=PART,
            name=f"an iteration of {n} decodes",
            value=_iteration_s(n),
            unit="us",
            note="without leaps",
        )
        for n in RUNNING
    ]
    note = f"requests/s of wall clock, {RATE_RPS:g} a second each"
    for replicas in REPLICAS:
        plan = _conversations(requests, RATE_RPS * replicas, seed)
        figures += [
            Figure(
                part=PART,
                name=f"replicas: {replicas}",
                value=len(plan) / _timed(plan, "fcfs", replicas)[0],
                unit="",
                note=note,
            )
        ]
    return figures


def _one_replica(requests: int, seed: int) -> tuple[dict[str, float], float]:
    plan = _conversations(requests, RATE_RPS, seed)
    rates = {
        f"{policy}, 4 requests/s": len(plan) / _timed(plan, policy, 1)[0]
        for policy in ("fcfs", "qoserve")
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rates, peak * (1.0 if sys.platform == "darwin" else 1024.0)


def _conversations(requests: int, rate_rps: float, seed: int) -> list[PlannedRequest]:
    arrivals = draw_arrivals(Gaps(), rate_rps, requests / rate_rps, seed, ((1.0, 1.0),))
    return plan_requests(arrivals, named_workload("azure-conv", CONTEXT_TOKENS), QOSERVE_3, seed)


def _timed(
    plan: list[PlannedRequest], policy: str, replicas: int, *, leaps: bool = True
) -> tuple[float, SimulationResult]:
    settings = {"chunk_tokens": "512", "router": "round_robin"}
    began_s = time.perf_counter()
    result = simulate(
        Traffic(plan, QOSERVE_3, seed=0),
        Deployment(policy, PROFILE, replicas, settings),
        RunOptions(leaps=leaps),
    )
    return time.perf_counter() - began_s, result


def _iteration_s(running: int) -> float:
    """The seconds of wall clock of an iteration of `running` decodes.

    The first iterations prefill the requests.
    """
    plan = [PlannedRequest(n, 0.0, 16, STEPS, "Q3", 1.0, "default", "") for n in range(running)]
    took_s, result = _timed(plan, "fcfs", 1, leaps=False)
    return took_s / result.iterations
