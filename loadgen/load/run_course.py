"""The course of a run, for its plots: latencies, and how many requests met their SLO, by time."""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from loadgen.load.tally import Tally

Numbers = NDArray[np.float64]
MEASURES = ("TTFT", "TBT", "TTLT")
QUANTILES = np.linspace(0, 1, 201)  # of a distribution: the eye sees no more of them
PARTS = 60  # of a run's time
SHORTEST_PART_S = 0.5


class Course(Struct, frozen=True, kw_only=True):
    """`quantiles_s`: by tier and measure, 201 values from the least to the greatest. `offered` and
    `met`: by tier, requests by the part of the run in which they came, each `part_s` long.
    """

    part_s: float
    quantiles_s: dict[str, dict[str, list[float]]]
    offered: dict[str, list[int]]
    met: dict[str, list[int]]


def course_of(
    tiers: Sequence[str],
    arrival_s: Sequence[float],
    met: Sequence[bool],
    latencies_s: Mapping[str, Mapping[str, Numbers]],
    duration_s: float,
) -> Course:
    """`tiers`, `arrival_s` and `met` run along the requests; `latencies_s`: by tier and measure."""
    part_s = max(duration_s / PARTS, SHORTEST_PART_S)
    parts = max(1, int(np.ceil(duration_s / part_s)))
    place = np.minimum((np.asarray(arrival_s) / part_s).astype(int), parts - 1)
    kinds, kept = np.asarray(tiers), np.asarray(met, dtype=bool)

    def counted(mask: NDArray[np.bool_]) -> list[int]:
        counts: list[int] = np.bincount(place[mask], minlength=parts).tolist()
        return counts

    names = list(dict.fromkeys(tiers))
    return Course(
        part_s=part_s,
        quantiles_s={
            tier: {
                measure: np.quantile(values, QUANTILES).tolist()
                for measure, values in of.items()
                if len(values)
            }
            for tier, of in latencies_s.items()
        },
        offered={name: counted(kinds == name) for name in names},
        met={name: counted((kinds == name) & kept) for name in names},
    )


def course_of_tally(tally: Tally, duration_s: float) -> Course | None:
    """The course of a run as its client saw it; None where nothing was sent."""
    outcomes = tally.outcomes
    if not outcomes:
        return None
    latencies_s = {
        tier: {
            "TTFT": np.array(
                [s for o in outcomes if o.planned.tier == tier and (s := o.ttft_s) is not None]
            ),
            "TBT": np.asarray(gaps, dtype=np.float64),
            "TTLT": np.array(
                [s for o in outcomes if o.planned.tier == tier and (s := o.ttlt_s) is not None]
            ),
        }
        for tier, gaps in tally.gaps_s.items()
    }
    begin_unix_s = min(o.sent_unix_s for o in outcomes)
    return course_of(
        [o.planned.tier for o in outcomes],
        [o.sent_unix_s - begin_unix_s for o in outcomes],
        [o.met for o in outcomes],
        latencies_s,
        duration_s,
    )
