"""Computes when the next token is due by the mean over each ten tokens (`max-tpot-10`): token n may
come ten paces after token n - 10. The first ten count from the first one.
"""

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.seam import Floats, View

TEN = 10  # by the definition
NEXT = np.arange(TEN)  # the next token and those after it, as many as are in one of its windows


class Windows:
    """Keeps the instants of the last ten tokens of each request, by its slot."""

    def __init__(self) -> None:
        self._arrived_unix_s = np.zeros(0)  # [slot] of the request that it knows
        self._made = np.zeros(0, dtype=np.int64)  # [slot] tokens
        self._token_unix_s = np.zeros((0, TEN))  # [slot, number of the token % TEN]

    def next_tokens(self, view: View, rows: Rows, pace_s: Floats) -> tuple[Floats, Floats]:
        """[rows] seconds until the next token is due: if what its windows have left belongs to
        their tokens alike; and if those after it come `pace_s` apart.
        """
        made = view.generated_tokens[rows].astype(np.int64)
        slots = view.slot[rows]
        self._see(view, rows, slots, made)
        tbt_s = view.tbt_s[rows, np.newaxis]
        before = made[:, np.newaxis] + (1 - TEN) + NEXT  # number of the token ten before
        ends_s = self._token_unix_s[slots[:, np.newaxis], before % TEN] + (
            TEN * tbt_s - view.start_unix_s
        )
        if made.min() < TEN:
            first_s = view.first_token_unix_s[rows, np.newaxis] - view.start_unix_s
            ends_s = np.where(before >= 1, ends_s, first_s + (before + TEN - 1) * tbt_s)
        even_s: Floats = (ends_s / (NEXT + 1)).min(axis=1)
        latest_s: Floats = (ends_s - NEXT * pace_s[:, np.newaxis]).min(axis=1)
        return even_s, latest_s

    def _see(self, view: View, rows: Rows, slots: Rows, made: Rows) -> None:
        """Learn the tokens that came since the last time. Several came evenly."""
        if (more := int(slots.max()) + 1 - len(self._made)) > 0:
            more = max(more, len(self._made))
            self._arrived_unix_s = np.append(self._arrived_unix_s, np.full(more, np.nan))
            self._made = np.append(self._made, np.zeros(more, dtype=np.int64))
            self._token_unix_s = np.append(self._token_unix_s, np.zeros((more, TEN)), axis=0)
        fresh = (self._arrived_unix_s[slots] != view.arrived_unix_s[rows]).nonzero()[0]
        if len(fresh):  # what came between the first token and the newest is not known here
            self._arrived_unix_s[slots[fresh]] = view.arrived_unix_s[rows[fresh]]
            self._made[slots[fresh]] = 1
            self._token_unix_s[slots[fresh], 1] = view.first_token_unix_s[rows[fresh]]
        known, newest = self._made[slots], view.newest_token_unix_s[rows]
        new = made - known
        since = self._token_unix_s[slots, known % TEN]
        for back in range(1, min(int(new.max()), TEN)):
            some = (new > back).nonzero()[0]
            part = back / new[some]
            came = newest[some] * (1 - part) + since[some] * part
            self._token_unix_s[slots[some], (made[some] - back) % TEN] = came
        self._token_unix_s[slots, made % TEN] = newest
        self._made[slots] = made
