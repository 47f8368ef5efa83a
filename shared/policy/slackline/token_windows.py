"""The next tokens of decodes that are judged by the mean over each ten tokens (`max-tpot-10`).

Token n may come ten paces after token n - 10. So tokens that came early leave time, and it is spent
in two ways:

- *Spread*: the time that a window has left belongs to its tokens alike. The next token is due
  after the least share, over the windows that it is in.
- *Put off*: once, a token may keep all others of its windows waiting, if these then come one
  iteration after the other. That is the time for prefills without any decode.

The first ten tokens count from the first one.
"""

from typing import NamedTuple

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.seam import DEFINITIONS, Floats, View
from shared.vocabulary import Definition

_WINDOWS = DEFINITIONS.index(Definition.MAX_TPOT_10)
TEN = 10
NEXT = np.arange(TEN)  # the next token and those after it, as many as are in one of its windows


class NextTokens(NamedTuple):
    """[rows] seconds from the start of the iteration."""

    due_s: Floats
    latest_s: Floats  # the latest, if the tokens after it come one iteration after the other
    until_s: Floats  # the latest, whenever the tokens after it come


class Windows:
    """It keeps the instants of the last ten tokens of each request, by its slot."""

    def __init__(self) -> None:
        self._arrived_unix_s = np.zeros(0)  # [slot] of the request that it knows
        self._made = np.zeros(0, dtype=np.int64)  # [slot] tokens
        self._token_unix_s = np.zeros((0, TEN))  # [slot, number of the token % TEN]

    def next_tokens(self, view: View, token_due_s: Floats, step_s: float) -> NextTokens:
        """[rows] the next token of each decode: by its windows where these judge it, else due at
        `token_due_s`. An iteration takes `step_s`.
        """
        judged = view.definition == _WINDOWS
        if not np.count_nonzero(judged):
            return NextTokens(token_due_s, token_due_s, token_due_s)
        rows = (
            judged
            & view.in_decode
            & np.isfinite(view.tbt_s)
            & np.isfinite(view.newest_token_unix_s)
        ).nonzero()[0]
        if not len(rows):
            return NextTokens(token_due_s, token_due_s, token_due_s)
        self._see(view, rows)
        ends_s = self._ends_unix_s(view, rows) - view.start_unix_s
        pace_s = np.minimum(step_s, view.tbt_s[rows])
        due_s, latest_s, until_s = token_due_s.copy(), token_due_s.copy(), token_due_s.copy()
        due_s[rows] = (ends_s / (NEXT + 1)).min(axis=1)
        latest_s[rows] = np.maximum(
            token_due_s[rows], (ends_s - NEXT * pace_s[:, np.newaxis]).min(axis=1)
        )
        until_s[rows] = ends_s[:, 0]
        return NextTokens(due_s, latest_s, until_s)

    def _ends_unix_s(self, view: View, rows: Rows) -> Floats:
        """[rows, TEN] by when the next token must come, and the others of its windows."""
        made, tbt_s = view.generated_tokens[rows], view.tbt_s[rows, np.newaxis]
        before = made[:, np.newaxis] + 1 + NEXT - TEN  # number of the token ten before
        came = self._token_unix_s[view.slot[rows, np.newaxis], before % TEN]
        ends: Floats = came + TEN * tbt_s
        if made.min() < TEN:
            first = view.first_token_unix_s[rows, np.newaxis]
            ends = np.where(before >= 1, ends, first + (before + TEN - 1) * tbt_s)
        return ends

    def _see(self, view: View, rows: Rows) -> None:
        """Learn the tokens that came since the last time. Several came evenly."""
        slots, made = view.slot[rows], view.generated_tokens[rows].astype(np.int64)
        self._grow(int(slots.max()) + 1)
        newest = view.newest_token_unix_s[rows]
        others = (self._arrived_unix_s[slots] != view.arrived_unix_s[rows]).nonzero()[0]
        if len(others):  # what came between the first token and the newest is not known here
            fresh = slots[others]
            self._arrived_unix_s[fresh] = view.arrived_unix_s[rows[others]]
            self._made[fresh] = 1
            self._token_unix_s[fresh, 1] = view.first_token_unix_s[rows[others]]
        known = self._made[slots]
        new = made - known
        most = min(int(new.max()), TEN)
        if most > 1:
            since = self._token_unix_s[slots, known % TEN]
            for back in range(1, most):
                some = (new > back).nonzero()[0]
                part = back / new[some]
                self._token_unix_s[slots[some], (made[some] - back) % TEN] = (
                    newest[some] * (1 - part) + since[some] * part
                )
        self._token_unix_s[slots, made % TEN] = newest
        self._made[slots] = made

    def _grow(self, slots: int) -> None:
        more = max(slots, 2 * len(self._made)) - len(self._made)
        if slots > len(self._made):
            self._arrived_unix_s = np.append(self._arrived_unix_s, np.full(more, np.nan))
            self._made = np.append(self._made, np.zeros(more, dtype=np.int64))
            self._token_unix_s = np.append(self._token_unix_s, np.zeros((more, TEN)), axis=0)
