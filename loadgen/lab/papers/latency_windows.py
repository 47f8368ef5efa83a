"""Latencies and violations over the course of a run, window after window (QoServe Figure 13)."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from loadgen.load.mix import PlannedRequest
from shared.rules.tiers import TierSet
from shared.schemas import Verdict
from shared.vocabulary import Missed


class Windows(Struct, frozen=True, kw_only=True):
    """The latency of a request is its TTFT where its tier bounds that, otherwise its TTLT.

    p99_s: [tier][window of arrivals] the 99th percentile over the most important requests; None
        where none of them arrived.
    longest_s: the longest of all requests.
    violated_fraction: [window of arrivals] of all requests; None where none arrived.
    """

    p99_s: dict[str, list[float | None]]
    longest_s: float
    violated_fraction: list[float | None] = []


def windows_of(
    requests: Sequence[PlannedRequest],
    verdicts: Sequence[Verdict | None],
    tiers: TierSet,
    window_s: float,
) -> Windows:
    """A request that never ended has no latency; it is violated."""
    most = max(request.importance for request in requests)
    by_tier: dict[str, dict[int, list[float]]] = {name: {} for name in tiers.tiers}
    offered, violated = Counter[int](), Counter[int]()
    longest_s = 0.0
    for request, verdict in zip(requests, verdicts, strict=True):
        arrived = int(request.arrival_s // window_s)
        offered[arrived] += 1
        violated[arrived] += verdict is None or verdict.missed != Missed.NOTHING
        if verdict is None:
            continue
        first_counts = tiers.tiers[request.tier].slo.ttft_s is not None
        latency_s = verdict.ttft_s if first_counts else verdict.ttlt_s
        if latency_s is None:
            continue
        longest_s = max(longest_s, latency_s)
        if request.importance == most:
            by_tier[request.tier].setdefault(arrived, []).append(latency_s)
    count = 1 + max((window for found in by_tier.values() for window in found), default=-1)
    return Windows(
        p99_s={
            name: [float(np.percentile(found[n], 99)) if n in found else None for n in range(count)]
            for name, found in by_tier.items()
        },
        longest_s=longest_s,
        violated_fraction=[
            violated[n] / offered[n] if offered[n] else None for n in range(1 + max(offered))
        ],
    )
