"""Measures the speed and memory of the simulator.

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
from loadgen.load.mix import plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import QOSERVE_3

PART = "simulator"
PROFILE = "a100-llama3-8b"
RATE_RPS = 4.0
CONTEXT_TOKENS = 8192
LEAST = 4000.0  # requests/s
AIM_MEMORY_BYTES = 300e6


def measure(requests: int, seed: int) -> list[Figure]:
    """Simulates `requests` on one replica under each policy."""
    # in a process of its own, so that the peak of its memory is that of these runs
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        rates, memory_bytes = alone.submit(_run, requests, seed).result()
    note = "requests/s of wall clock"
    figures = [
        Figure(PART, f"{policy}, {RATE_RPS:g} requests/s", rate, "", least=LEAST, note=note)
        for policy, rate in rates.items()
    ]
    name, note = "peak memory of a run", f"{requests} requests"
    return [*figures, Figure(PART, name, memory_bytes, "MB", aim=AIM_MEMORY_BYTES, note=note)]


def _run(requests: int, seed: int) -> tuple[dict[str, float], float]:
    """The requests simulated per second of wall clock, by policy; and this process's bytes."""
    arrivals = draw_arrivals(Gaps(), RATE_RPS, requests / RATE_RPS, seed, ((1.0, 1.0),))
    lengths = named_workload("azure-conv", CONTEXT_TOKENS)
    plan = plan_requests(arrivals, lengths, QOSERVE_3, seed)
    settings = {"chunk_tokens": "512", "router": "round_robin"}
    rates = {}
    for policy in ("fcfs", "qoserve"):
        began_s = time.perf_counter()
        simulate(Traffic(plan, QOSERVE_3, seed=0), Deployment(policy, PROFILE, 1, settings))
        rates[policy] = len(plan) / (time.perf_counter() - began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return rates, peak * (1.0 if sys.platform == "darwin" else 1024.0)
