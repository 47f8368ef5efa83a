"""The decodes in the order in which their next tokens are due, and the passes that they need."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shared.perf.shape import BatchShape
from shared.policy.chunk import Rows
from shared.policy.seam import Bools, Floats, View

# Live, nine of ten iterations come within 2 ms (docs/simulator.md).
MARGIN_S = 0.001
CLOSE_S = 1e-9


class Timing(NamedTuple):
    """Seconds from the beginning of the iteration, in columns along the view's rows."""

    prefill_due_s: Floats
    token_due_s: Floats  # of the next token of a decode: who may sit out
    put_off_s: Floats  # the same, or later where earned time may be spent: how long it may take
    latest_s: Floats  # the same, or later: how long prefills without any decode may take
    pace_s: Floats
    until_s: Floats  # of windows: the latest for the next token of a decode
    each_s: Floats  # that a TTLT leaves to each token still expected, as of `left_s`


@dataclass(slots=True)
class TokenOrder:
    """Decodes in the order in which their tokens are due, in columns."""

    rows: Rows
    due_s: Floats
    put_off_s: Floats
    begin_s: Floats  # `latest_s`, in any order
    pass_s: Floats  # of a pass of all up to each
    batch_s: float  # of a pass of none
    in_time: Bools = field(init=False)  # its due time can be kept
    kept: int = field(init=False)  # due times that can be kept

    def __post_init__(self) -> None:
        self.in_time = self.put_off_s >= self.pass_s + MARGIN_S - CLOSE_S
        self.kept = int(np.count_nonzero(self.in_time))

    @property
    def all_kept(self) -> bool:
        """Every due time can be kept."""
        return self.kept == len(self.rows)

    @property
    def first_due_s(self) -> float:
        """The first due time that can be kept; inf if none can."""
        return float(self.put_off_s[self.in_time.argmax()]) if self.kept else math.inf

    @property
    def paced_s(self) -> float:
        """The same by `due_s`, without what `put_off_s` adds to it."""
        kept = self.in_time & (self.due_s >= self.pass_s + MARGIN_S - CLOSE_S)
        return float(self.due_s[kept].min(initial=math.inf))

    @property
    def every_s(self) -> float:
        """Seconds of a pass of all."""
        return float(self.pass_s[-1]) + MARGIN_S

    @property
    def latest_s(self) -> float:
        """Seconds until the next pass must begin. With those due first it has all the others up to
        each due time, or these have another pass after it.
        """
        begin_s = np.sort(self.begin_s)
        until_s = np.maximum(begin_s[0], begin_s - self.batch_s)
        return float((until_s - self.pass_s).min()) - MARGIN_S

    def running(self, longest_s: float) -> Rows:
        """Those that run in a batch of this length: due before the batch after it would end, as
        many as fit. All that fit run, if the others would be too many for the time after it.
        """
        fits = self.pass_s <= longest_s - MARGIN_S + CLOSE_S
        due = self.due_s < 2 * longest_s - CLOSE_S
        runs = due & (fits | (self.put_off_s <= longest_s + CLOSE_S))
        if self._too_many(~runs, longest_s):
            runs |= fits
        return self.rows[runs]

    def _too_many(self, rest: Bools, longest_s: float) -> bool:
        """True if these cannot all be in time after a batch of this length: not in a pass with
        those due before them, nor in another pass after it. Those that are late anyway do not
        count.
        """
        in_time = rest & self.in_time
        if not np.count_nonzero(in_time):
            return False
        one_s = self.pass_s.copy()
        one_s[0] -= self.batch_s
        one_s[1:] -= self.pass_s[:-1]
        ends_s = longest_s + self.batch_s + (one_s * rest).cumsum() + MARGIN_S
        until_s = np.maximum(self.put_off_s[rest.argmax()], self.put_off_s - self.batch_s)
        late = in_time & (ends_s > until_s + CLOSE_S)
        return bool(np.count_nonzero(late))


def standard_decodes(view: View) -> Rows:
    """The decodes that are not best-effort."""
    rows: Rows = (view.in_decode & view.standard).nonzero()[0]
    return rows


def token_order(view: View, timing: Timing, decodes: Rows) -> TokenOrder:
    """The order of these decodes. If one with a pace cannot be in time, those with a TTLT alone
    make no iteration shorter than a pass of all: short passes take time that paces need.
    """
    tokens = _in_order(view, timing, decodes, timing.put_off_s[decodes])
    if tokens.all_kept:
        return tokens
    whole = view.has_ttlt[tokens.rows] & np.isinf(view.tightest_tbt_s[tokens.rows])
    late = np.count_nonzero(~(tokens.in_time | whole))
    if not late or not np.count_nonzero(whole):
        return tokens
    put_off_s = np.where(whole, np.maximum(tokens.put_off_s, tokens.every_s), tokens.put_off_s)
    return _in_order(view, timing, tokens.rows, put_off_s)


def _in_order(view: View, timing: Timing, decodes: Rows, put_off_s: Floats) -> TokenOrder:
    """The order of these decodes. `put_off_s` runs along them."""
    order = put_off_s.argsort(kind="stable")
    rows, put_off_s = decodes[order], put_off_s[order]
    due_s = timing.token_due_s[rows]
    if not len(rows):
        return TokenOrder(rows, due_s, put_off_s, put_off_s, put_off_s, 0.0)
    context = view.top_tokens[rows].cumsum()
    count, last = len(rows), int(context[-1])
    every = BatchShape(decodes=count, decode_context=last)
    every_s = view.profile.batch_s(every)
    one_s, token_s = costs_of_one(view, every, every_s)
    left = np.arange(count - 1, -1, -1)
    pass_s = every_s - one_s * left - token_s * (last - context)
    none_s = every_s - one_s * count - token_s * last
    return TokenOrder(rows, due_s, put_off_s, timing.latest_s[rows], pass_s, none_s)


def costs_of_one(view: View, every: BatchShape, every_s: float) -> tuple[float, float]:
    """Seconds of one decode, and of one token of a context, in such a pass of decodes, which takes
    `every_s`. Profiles are linear in both.
    """
    batch_s = view.profile.batch_s
    first_s = batch_s(BatchShape(decodes=1, decode_context=every.decode_context))
    without_s = batch_s(BatchShape(decodes=every.decodes))
    one_s = (every_s - first_s) / max(every.decodes - 1, 1)
    return one_s, (every_s - without_s) / max(every.decode_context, 1)
