"""Requests of a recorded trace, with its arrivals and its lengths: one half of its time.

The rate of a run is reached in two steps. A part of the rows is kept, drawn with the seed, so that
there are several loads of one trace. Then the time of the half is stretched or shortened as a
whole, which leaves its bursts as they are beside each other.
"""

from enum import StrEnum
from random import Random

from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.trace import Trace
from loadgen.load.workload import Rows
from shared.errors import ConfigError
from shared.rules.tiers import TierSet

KEPT = 0.8  # of the rows
# Times of this trace were rounded down to multiples of so many seconds.
ROUNDED_S = {"mooncake_conversation_first_half": 3.0}


class Half(StrEnum):
    FIRST = "first"
    SECOND = "second"


def recorded_requests(
    trace: Trace, half: Half, *, rate_rps: float, duration_s: float, tiers: TierSet, seed: int
) -> list[PlannedRequest]:
    """The requests of the first `duration_s` of this half, at `rate_rps` in the mean of the half.
    Raises ConfigError for a trace without times.
    """
    if not trace.recorded:
        raise ConfigError(f"trace {trace.name} has no arrival times")
    rng, middle_s = Random(f"{trace.name}/{seed}"), trace.span_s / 2
    rounded_s, begin_s = ROUNDED_S.get(trace.name, 0.0), middle_s if half is Half.SECOND else 0.0
    rows = [
        row._replace(arrival_s=arrival_s - begin_s + rng.uniform(0.0, rounded_s))
        for row, arrival_s in ((row, row.arrival_s or 0.0) for row in trace.rows)
        if (arrival_s >= middle_s) == (half is Half.SECOND) and rng.random() < KEPT
    ]
    times = len(rows) / (rate_rps * middle_s)  # what a second becomes
    rows = [row._replace(arrival_s=(row.arrival_s or 0.0) * times) for row in rows]
    rows = sorted(
        (row for row in rows if (row.arrival_s or 0.0) < duration_s),
        key=lambda row: row.arrival_s or 0.0,
    )
    arrivals_s = [row.arrival_s or 0.0 for row in rows]
    return plan_requests(arrivals_s, Rows(Trace(trace.name, rows), in_order=True), tiers, seed)
