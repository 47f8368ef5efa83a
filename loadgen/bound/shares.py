"""Divides iteration time among requests: at every instant, the requests that may be decoding divide
the seconds that each iteration collects (docs/bound.md, 4).

A share never grows with time, so that a step is cheapest at its deadline, and the shares of one
instant sum to at most 1.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.bound.work import Work

Floats = NDArray[np.float64]
Cells = NDArray[np.int64]
BLOCK = 1024  # payers worked on at once, which bounds the memory
CELLS = 16_384  # at most, of the time in which any request has a share
WINDOW_CELLS = 256  # about the number of cells of the longest window
# of the pace asked for: each round gives the rest to more of the requests
POWERS = (8.0, 4.0, 2.0, 1.0, 0.0)
QUICK = 0.97  # the quantile of the paces asked for that serves as the unit
SLOWEST = 0.25  # of that unit: slower requests get no share


class Payers(NamedTuple):
    """Requests that ask for so quick a pace that they may have a share; arrays along them."""

    of: NDArray[np.int64]  # their place among the requests
    pace: Floats  # steps per second over the window, relative to the quick one
    first: NDArray[np.int64]  # cells of the window
    last: NDArray[np.int64]
    cell_s: float
    begin_s: float
    cells: int


def payers(work: Work) -> Payers:
    window_s = np.maximum(work.due_s - work.steps_from_s, 1e-9)
    pace = np.where(np.isfinite(window_s) & ~work.hopeless, work.steps / window_s, 0.0)
    if not pace.any():
        of = np.flatnonzero(pace)
        return Payers(of, pace[of], of, of, 1.0, 0.0, 1)
    quick = float(np.quantile(pace[pace > 0], QUICK))
    of = np.flatnonzero(pace > SLOWEST * quick)
    begin_s, end_s = float(work.steps_from_s[of].min()), float(work.due_s[of].max())
    cell_s = max(float(window_s[of].max()) / WINDOW_CELLS, (end_s - begin_s) / CELLS)
    first = ((work.steps_from_s[of] - begin_s) / cell_s).astype(np.int64)
    last = ((work.due_s[of] - begin_s) / cell_s).astype(np.int64)
    return Payers(of, pace[of] / quick, first, last, cell_s, begin_s, int(last.max()) + 1)


def shared_steps(work: Work, by: Payers, worth: Floats) -> Floats:
    """[requests] the sum over a request's steps of its share at the step's deadline.

    `worth`: the size of that sum beyond which paying more is worth nothing; 0 for a request that
    is not to pay.
    """
    total = np.zeros(len(work.steps))
    if not len(by.of):
        return total
    left, handed = np.ones(by.cells), np.zeros(by.cells)
    for power in POWERS:
        paying = np.flatnonzero(total[by.of] < worth[by.of] * (1 - 1e-6))
        if not len(paying):
            break
        weight = by.pace[paying] ** power
        first, last, of = by.first[paying], by.last[paying], by.of[paying]
        asked = np.bincount(first, weight, by.cells + 1) - np.bincount(
            last + 1, weight, by.cells + 1
        )
        asked = np.maximum(np.cumsum(asked)[:-1], 1e-12)
        each = left / asked
        for begin in range(0, len(paying), BLOCK):
            block = slice(begin, begin + BLOCK)
            cells, shares, paid = _shares(
                work, by, each, weight[block], first[block], last[block], of[block]
            )
            part = np.minimum(1.0, (worth[of[block]] - total[of[block]]) / np.maximum(paid, 1e-12))
            total[of[block]] += part * paid
            handed += np.bincount(cells.ravel(), (part[:, None] * shares).ravel(), by.cells)
        left = np.maximum(1.0 - handed, 0.0)
    # `asked` is a running sum and rounds: an excess that it handed out is taken back from all
    # requests.
    return total / (max(1.0, float(handed.max())) * (1 + 1e-12))


def _shares(
    work: Work, by: Payers, each: Floats, weight: Floats, first: Cells, last: Cells, of: Cells
) -> tuple[Cells, Floats, Floats]:
    """[payers, cells of the longest window] the cells, and the shares in them; and [payers] the sum
    of the shares of all steps at their deadlines.
    """
    cells = first[:, None] + np.arange(int((last - first).max()) + 1)
    live = cells <= last[:, None]
    cells = np.minimum(cells, last[:, None])
    shares = np.minimum.accumulate(each[cells], axis=1) * weight[:, None] * live
    # The number of steps that are due by the end of each cell; by the end of the last one, all.
    pace_s = np.where(work.pace_s[of] > 0, work.pace_s[of], np.inf)
    due = np.floor(
        (by.begin_s + (cells + 1) * by.cell_s - work.step_due_s[of][:, None]) / pace_s[:, None]
    )
    steps = work.steps[of][:, None]
    due = np.where(cells == last[:, None], steps, np.clip(due, 0, steps))
    return cells, shares, (shares * np.diff(due, axis=1, prepend=0.0)).sum(axis=1)
