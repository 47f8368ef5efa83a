"""The loads on which laws of scaling are compared.

The day takes two hours: its rate changes twelve times as fast, so that a warm-up of 30 s is six
minutes of it, and one of 300 s an hour. The morning, six hours, takes the one that is recorded. The
gaps between requests are not squeezed. Busiest hours fill five to seven replicas.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random

from loadgen.load.arrivals import SHAPES, Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import Rows, named_workload
from shared.errors import ConfigError
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

# recorded traces, which do not come with the project
TRACES = Path(os.environ.get("TRACES", "../shared/data/traces"))
CONTEXT_TOKENS = 8192
TIERS = TierSet(
    name="scaling",
    default="chat",
    tiers={
        "interactive": Tier(slo=Slo(ttft_s=3.0, tbt_s=0.15), share=0.4),
        "chat": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.25), share=0.3),
        "summary": Tier(slo=Slo(ttlt_s=600.0), share=0.2),
        "batch": Tier(slo=Slo(ttlt_s=86_400.0), share=0.1),
    },
)
# The load of each hour of a day, in parts of the busiest: little at night, two peaks.
HOURS = (
    0.30, 0.22, 0.17, 0.15, 0.15, 0.18, 0.28, 0.45, 0.68, 0.88, 1.00, 0.97,
    0.85, 0.88, 0.97, 1.00, 0.93, 0.80, 0.70, 0.66, 0.62, 0.55, 0.46, 0.38,
)  # fmt: skip
Requests = Sequence[PlannedRequest]


def curve(at: float) -> float:
    """The load at this part of the day, linear between the hours."""
    place = at * 24.0
    hour, part = int(place) % len(HOURS), place % 1.0
    return HOURS[hour] * (1 - part) + HOURS[(hour + 1) % len(HOURS)] * part


def day(seed: int, *, workload: str, peak_rps: float, length_s: float, cv: float = 1.0) -> Requests:
    """A day by a law of lengths, at `peak_rps` in its busiest hour."""
    pieces = 240
    profile = [(length_s / pieces, curve((n + 0.5) / pieces)) for n in range(pieces)]
    arrivals = draw_arrivals(Gaps(cv), peak_rps, length_s, seed, profile)
    return plan_requests(arrivals, named_workload(workload, CONTEXT_TOKENS), TIERS, seed)


def drifting(seed: int, *, workload: str, rate_rps: float, length_s: float) -> Requests:
    """The rate stays, and the mix drifts: from eight in ten for batches to as many for people."""
    arrivals = draw_arrivals(Gaps(), rate_rps, length_s, seed)
    plan = list(plan_requests(arrivals, named_workload(workload, CONTEXT_TOKENS), TIERS, seed))
    names = list(TIERS.tiers)
    for i, request in enumerate(plan):
        rng, people = Random(f"{seed}/drift/{i}"), 0.2 + 0.6 * request.arrival_s / length_s
        weights = (0.55 * people, 0.45 * people, 0.5 * (1 - people), 0.5 * (1 - people))
        plan[i] = request._replace(tier=rng.choices(names, weights)[0])
    return plan


def bursts(seed: int, *, rate_rps: float, length_s: float) -> Requests:
    """The minutes of Azure's code trace, again and again: silence, then three times the mean."""
    profile = [(60.0, multiple) for multiple in SHAPES["azure-code"]]
    arrivals = draw_arrivals(Gaps(2.0), rate_rps, length_s, seed, profile)
    return plan_requests(arrivals, named_workload("azure-code", CONTEXT_TOKENS), TIERS, seed)


def recorded(seed: int, *, file: str) -> Requests:
    """A recorded trace as it is."""
    return _planned(file, _trace(file).rows, seed)


def morning(seed: int, *, file: str, peak: float, from_h: float, until_h: float) -> Requests:
    """A recorded trace, thinned to the rates of these hours of a day: of the busiest hour the part
    `peak` is kept.
    """
    trace, rng = _trace(file), Random(f"{seed}/thinned")

    def kept(row: TraceRow) -> float:
        at = (row.arrival_s or 0.0) / trace.span_s
        return peak * curve((from_h + (until_h - from_h) * at) / 24.0)

    return _planned(file, [row for row in trace.rows if rng.random() < kept(row)], seed)


def _trace(file: str) -> Trace:
    path = TRACES / file
    if not path.exists():
        raise ConfigError(f"{path} is missing: TRACES names the folder of recorded traces")
    return read_trace(path).within(CONTEXT_TOKENS)


def _planned(name: str, rows: Sequence[TraceRow], seed: int) -> Requests:
    arrivals = [row.arrival_s or 0.0 for row in rows]
    return plan_requests(arrivals, Rows(Trace(name, rows), in_order=True), TIERS, seed)


DAYS: Mapping[str, Callable[[int], Requests]] = {
    "day of code": partial(day, workload="azure-code", peak_rps=13.0, length_s=7200.0),
    "morning, ServeGen": partial(
        morning, file="servegen_m_large_day2_1000_1100.csv.gz", peak=0.2, from_h=4.0, until_h=10.0
    ),
    "mix that drifts": partial(drifting, workload="azure-code", rate_rps=10.0, length_s=2400.0),
    "bursts of code": partial(bursts, rate_rps=4.0, length_s=1680.0),
    "Azure code, recorded": partial(recorded, file="azure2023_code_first_half.csv.gz"),
}
