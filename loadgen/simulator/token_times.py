"""A request's Measure (shared/measure.py), computed from the instants of all its tokens at once."""

from array import array

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shared.measure import CLOSE_S, WINDOW_TOKENS, Measure, TpotWindows
from shared.vocabulary import Definition, Slo

Floats = NDArray[np.float64]


def measured(
    times: "array[float]", slo: Slo, arrived_unix_s: float, thinking_tokens: int | None = None
) -> Measure:
    """The Measure that emit gives token by token. `thinking_tokens` None: all tokens think."""
    if not times:
        return Measure.begin(slo, arrived_unix_s)
    at, due = np.frombuffer(times), slo.first_due_unix_s(arrived_unix_s)
    thinking = (
        0
        if not slo.thinks
        else len(at)
        if thinking_tokens is None
        else min(thinking_tokens, len(at))
    )
    # the first deadline, then the pace from each token to the next: their sums are the deadlines
    dues = np.full(len(at) + 1, slo.pace_s(False))
    dues[1 : thinking if thinking_tokens is not None else thinking + 1] = slo.pace_s(True)
    dues[0] = due if due < float("inf") else at[0]
    gaps = np.diff(at)
    long_gaps = (
        int(np.count_nonzero(gaps > dues[1:-1] + CLOSE_S))
        if slo.definition is Definition.EVERY_GAP
        else 0
    )
    dues = np.add.accumulate(dues)
    return Measure(
        tokens=len(at),
        first_unix_s=float(at[0]),
        last_unix_s=float(at[-1]),
        next_due_unix_s=float(dues[-1]),
        worst_tbt_s=float(gaps.max(initial=0.0)),
        late_tokens=int(np.count_nonzero(at > dues[:-1] + CLOSE_S)),
        thinking_tokens=thinking_tokens,
        thought_unix_s=float(at[thinking - 1]) if thinking else 0.0,
        windows=_windows(at, thinking) if slo.definition is Definition.MAX_TPOT_10 else None,
        long_gaps=long_gaps,
    )


def _windows(at: Floats, thinking: int) -> TpotWindows:
    """The windows of ten tokens, as TpotWindows.emit has them. `thinking`: the thinking tokens."""
    if thinking in (0, len(at)):
        return _of_stage(at)
    thought, response = _of_stage(at[:thinking]), _of_stage(at[thinking - 1 :])
    return replace(response, thinking_worst_s=thought.present_s())


def _of_stage(at: Floats) -> TpotWindows:
    ends = at[WINDOW_TOKENS::WINDOW_TOKENS]
    begins = at[:-WINDOW_TOKENS:WINDOW_TOKENS]
    return TpotWindows(
        recent_unix_s=tuple(at[-WINDOW_TOKENS - 1 :].tolist()),
        worst_s=float(((ends - begins) / WINDOW_TOKENS).max(initial=0.0)),
    )
