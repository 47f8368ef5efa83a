"""Counts, for `slackline advise`, the violated requests of each minute."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from loadgen.advise.window import Window
from shared.schemas import Verdict

MINUTE_S = 60.0
BUSY = 0.1  # of the minutes


class Minutes(Struct, frozen=True, kw_only=True):
    """Requests by the minute of their arrival. `busy_share` is the share of the violated requests
    that came in the busiest tenth of the minutes, by prompt tokens.
    """

    offered: list[int]
    violated: list[int]
    prompt_tokens: list[int]
    busy_share: float | None  # None: none was violated


def by_minute(window: Window, verdicts: Sequence[Verdict | None]) -> Minutes:
    """The minutes of this window. `verdicts` run along its requests."""
    count = max(1, math.ceil(window.seconds / MINUTE_S))
    minute = np.array([min(int(r.arrival_s / MINUTE_S), count - 1) for r in window.requests])
    missed = np.array([verdict is None or not verdict.slo_met for verdict in verdicts])
    tokens = np.array([request.prompt_tokens for request in window.requests])
    offered = np.bincount(minute, minlength=count)
    violated = np.bincount(minute, weights=missed, minlength=count)
    prompts = np.bincount(minute, weights=tokens, minlength=count)
    busy = prompts.argsort()[::-1][: max(1, round(BUSY * count))]
    lost = float(violated.sum())
    return Minutes(
        offered=offered.astype(int).tolist(),
        violated=violated.astype(int).tolist(),
        prompt_tokens=prompts.astype(int).tolist(),
        busy_share=float(violated[busy].sum()) / lost if lost else None,
    )
