"""Draws the arrival times of requests: Poisson, Gamma or recorded gaps, under a rate that may
change over the run. Times are seconds from the start of the run.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from loadgen.load.rows.row import TraceRow
from loadgen.load.trace import Trace
from shared.errors import ConfigError

# (seconds, multiple of the rate), repeated to the end of the run
Profile = Sequence[tuple[float, float]]

# Requests per minute over their mean in the recorded code trace of Azure
# (AzureLLMInferenceTrace_code, 2023-11-16, CC-BY-4.0, Patel et al., ISCA 2024), 28 minutes: silent
# for minutes, then three times the mean.
AZURE_CODE_MINUTES = (
    0.35, 0.0, 0.0, 2.92, 1.03, 0.71, 0.08, 0.23, 0.21, 2.61, 2.31, 0.35, 0.0, 0.0,
    3.47, 1.64, 0.0, 0.11, 2.17, 1.73, 0.64, 0.43, 1.68, 2.45, 1.38, 0.19, 0.7, 0.61,
)  # fmt: skip
# The same bursts with the silence between them filled up to a third of the mean, in eight steps:
# overloaded a third of the time.
DEMO_STEPS = (0.35, 2.3, 0.35, 0.35, 2.6, 1.35, 0.35, 0.35)
SHAPES = {"azure-code": AZURE_CODE_MINUTES, "demo": DEMO_STEPS}


@dataclass(frozen=True, slots=True)
class Gaps:
    """Independent Gamma gaps with this coefficient of variation (shape 1/cv^2); 1 is Poisson."""

    cv: float = 1.0

    def draw(self, rng: Random) -> float:
        """One gap, mean 1."""
        if self.cv == 0:
            return 1.0
        shape = 1 / self.cv**2
        return rng.gammavariate(shape, 1 / shape)


def parse_gaps(text: str) -> Gaps:
    """`poisson` or `gamma:CV`. Raises ConfigError."""
    if text == "poisson":
        return Gaps()
    kind, _, value = text.partition(":")
    if kind == "gamma":
        try:
            cv = float(value)
        except ValueError:
            cv = math.nan
        if 0 <= cv <= 100:
            return Gaps(cv)
    raise ConfigError(
        f"arrivals `{text}`: expected poisson, gamma:CV (a coefficient of variation such as "
        f"gamma:2) or trace"
    )


def parse_profile(text: str, duration_s: float) -> Profile:
    """`SECONDS:MULTIPLE,...`, or a recorded shape stretched over the run. Raises ConfigError."""
    shape = SHAPES.get(text)
    if shape is not None:
        return [(duration_s / len(shape), multiple) for multiple in shape]
    try:
        steps = [
            (float(seconds), float(multiple))
            for seconds, multiple in (step.split(":") for step in text.split(","))
        ]
    except ValueError:
        steps = []
    if (
        not steps
        or any(not (0 < s < math.inf and 0 <= m < math.inf) for s, m in steps)
        or all(m == 0 for _, m in steps)
    ):
        raise ConfigError(
            f"bursts `{text}`: expected SECONDS:MULTIPLE,... such as 20:0.5,10:3, "
            f"or one of {', '.join(SHAPES)}"
        )
    return steps


class Warp:
    """Operational time, of constant rate, to seconds: the inverse of the profile's integral."""

    def __init__(self, profile: Profile) -> None:
        self._ends_s = list(accumulate(seconds for seconds, _ in profile))
        self._areas = list(accumulate(seconds * multiple for seconds, multiple in profile))
        self._profile = profile

    def seconds(self, operational: float) -> float:
        cycles, within = divmod(operational, self._areas[-1])
        step = min(bisect_right(self._areas, within), len(self._profile) - 1)
        multiple = self._profile[step][1]
        left = self._areas[step] - within
        return (
            cycles * self._ends_s[-1]
            + self._ends_s[step]
            - (left / multiple if multiple > 0 else 0.0)
        )


def draw_arrivals(
    gaps: Gaps, rate: float, duration_s: float, seed: int, profile: Profile = ((1.0, 1.0),)
) -> list[float]:
    """Arrivals in [0, duration_s): `rate` a second, times the profile at that time."""
    rng, warp = Random(f"{seed}/arrivals"), Warp(profile)
    arrivals, operational = list[float](), 0.0
    while True:
        operational += gaps.draw(rng) / rate
        at_s = warp.seconds(operational)
        if at_s >= duration_s:
            return arrivals
        arrivals.append(at_s)


def recorded_arrivals(
    trace: Trace, rate: float | None, duration_s: float, seed: int, jitter_s: float = 0.0
) -> tuple[Trace, float]:
    """The rows that arrive in [0, duration_s), as recorded; and the factor by which time was
    compressed (1: not at all).

    A rate below the recorded one keeps each row with that probability, which keeps the bursts; a
    rate above compresses time. `jitter_s`: each row first moves by up to so much, for traces whose
    times are rounded. Raises ConfigError if the trace has no times, or nothing arrives.
    """
    if not trace.recorded:
        raise ConfigError(
            f"trace {trace.name} has no arrival times: choose --arrivals poisson or gamma:CV"
        )
    factor = 1.0
    rows = trace.rows
    if jitter_s:
        rng = Random(f"{seed}/jitter")
        moved = [row._replace(arrival_s=_at(row) + rng.uniform(0.0, jitter_s)) for row in rows]
        rows = sorted(moved, key=_at)
    if rate is not None:
        factor = rate * trace.span_s / len(rows)
        if factor < 1:
            rng = Random(f"{seed}/thinning")
            rows = [row for row in rows if rng.random() < factor]
    squeeze = max(1.0, factor)
    kept = [
        row._replace(arrival_s=_at(row) / squeeze)
        for row in rows
        if _at(row) / squeeze < duration_s
    ]
    if not kept:
        raise ConfigError(
            f"trace {trace.name}: nothing arrives in the first {duration_s:g} s at that rate"
        )
    return replace(trace, rows=kept, failed=0), squeeze


def _at(row: TraceRow) -> float:
    return row.arrival_s or 0.0
