"""The state monitor (SOLA section 4.3): real-time TTFT and TPOT of each request, and how they stand
to the SLOs.

Where the paper leaves room:
- *SLOs* are each request's own, and every latency is taken as its ratio to them. With one SLO for
  all requests that is the paper.
- *Real-time TPOT* is the time since the first token over l_out, the tokens so far (Table 1): the
  token in the making counts for the first.
- A request that has its first token keeps the TTFT it got for as long as it runs, and p_TTFT counts
  it (section 4.3: the maximum is over all requests). With those still waiting alone, p_TTFT says
  little of how TTFT fares, and prefills are put off too long.
- A TTLT, which the paper does not have, leaves TTFT what the predicted output does not need at the
  pace of a decode, and shares the rest out over the tokens.
- A request whose KV was dropped is again to prefill, but what it owes is the pace: before its next
  token it has as long as the decodes.
- Best-effort requests, and those without the SLO in question, are not counted. They come last in
  every order.
"""

import math

import numpy as np

from shared.columns import Indices, Ints
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.seam import Bools, Floats, View

# Lengths at which the time of a prefill alone is asked for; between them it is read linearly.
GRID_TOKENS = np.array(
    [
        1,
        128,
        256,
        384,
        512,
        768,
        1024,
        1536,
        2048,
        3072,
        4096,
        6144,
        8192,
        12288,
        16384,
        24576,
        32768,
    ]
)
GRID_SHAPES = [BatchShape().with_chunk(tokens, 0) for tokens in GRID_TOKENS.tolist()]
# The bound of a request whose deadline has passed: any latency is many times as long.
SHORTEST_S = 1e-3


def alone_s(profile: Profile, left_tokens: Floats, cached_tokens: Ints) -> Floats:
    """C_p(r) of each request: seconds of the rest of its prefill with nothing else in the batch.
    The value is exact where some of the prompt is cached.
    """
    if len(left_tokens) == 0:
        return np.zeros(0)
    longest = float(left_tokens.max())
    grid = GRID_TOKENS[: int(np.searchsorted(GRID_TOKENS, longest)) + 1]
    seconds = [profile.batch_s(shape) for shape in GRID_SHAPES[: len(grid)]]
    if grid[-1] < longest:
        grid = np.append(grid, longest)
        seconds.append(profile.batch_s(BatchShape().with_chunk(int(longest), 0)))
    found: Floats = np.interp(left_tokens, grid, seconds)
    for i in cached_tokens.nonzero()[0].tolist():
        found[i] = profile.batch_s(
            BatchShape().with_chunk(int(left_tokens[i]), int(cached_tokens[i]))
        )
    return found


class State:
    """The state of every row of a view, in its order. `left_out` are the output tokens predicted to
    come; `decode_s` is the time of a decode now.
    """

    def __init__(self, view: View, left_out: Floats, decode_s: float) -> None:
        self.left_out = left_out
        self.decode_s = decode_s
        self.answered: Bools = view.generated_tokens > 0
        first = np.minimum(view.first_token_unix_s, view.start_unix_s)
        last_due = view.last_due_unix_s
        self.ttft_s: Floats = first - view.arrived_unix_s
        self.ttft_bound_s: Floats = view.first_due_unix_s - view.arrived_unix_s
        self.l_out: Floats = np.maximum(view.generated_tokens, 1.0)
        self.since_first_s: Floats = view.start_unix_s - first
        self.tpot_bound_s: Floats = view.tbt_s
        if np.isfinite(last_due).any():
            spare_s = np.where(
                self.answered, math.inf, last_due - view.arrived_unix_s - left_out * decode_s
            )
            self.ttft_bound_s = np.minimum(self.ttft_bound_s, np.maximum(spare_s, SHORTEST_S))
            share_s = np.where(self.answered, last_due - first, math.inf) / (self.l_out + left_out)
            self.tpot_bound_s = np.minimum(self.tpot_bound_s, np.maximum(share_s, SHORTEST_S))
        self._standard = view.standard
        self.has_ttft: Bools = self._standard & np.isfinite(self.ttft_bound_s)
        self.has_tpot: Bools = (
            self._standard & np.isfinite(self.tpot_bound_s) & (self.since_first_s > 0)
        )

    @property
    def ttft_ratios(self) -> Floats:
        """t_TTFT / T_TTFT of all requests that have such an SLO."""
        ratios: Floats = self.ttft_s[self.has_ttft] / self.ttft_bound_s[self.has_ttft]
        return ratios

    @property
    def tpot_ratios(self) -> Floats:
        """t_TPOT / T_TPOT of all requests that have such an SLO, and t_TPOT > 0."""
        counts = self.has_tpot
        ratios: Floats = self.since_first_s[counts] / self.l_out[counts] / self.tpot_bound_s[counts]
        return ratios

    @property
    def pause_s(self) -> Floats:
        """[all rows] the longest pause that keeps t_TPOT within the SLO (Eq. 1, solved for C_p)."""
        pause: Floats = self.tpot_bound_s * self.l_out - self.since_first_s
        return pause

    def decodes_by_tpot(self, rows: Rows) -> Rows:
        """The rows sorted by predicted TPOT, (t_TPOT * l_out + C_d * l_left) / (l_out + l_left),
        relative to the SLO, largest first (section 4.4.2).
        """
        l_out, left = self.l_out[rows], self.left_out[rows]
        predicted = (
            (self.since_first_s[rows] + self.decode_s * left)
            / (l_out + left)
            / self.tpot_bound_s[rows]
        )
        return rows[np.lexsort((rows, -np.where(self._standard[rows], predicted, 0.0)))]


class Prefills:
    """The rows still to prefill, sorted by predicted TTFT, t_TTFT + C_p, relative to the SLO,
    largest first (section 4.4.2). All arrays run in that order.
    """

    def __init__(self, view: View, state: State, rows: Rows) -> None:
        elapsed_s, bound_s = state.ttft_s[rows], state.ttft_bound_s[rows]
        again = state.answered[rows]
        if again.any():
            elapsed_s = np.where(again, state.since_first_s[rows], elapsed_s)
            bound_s = np.where(again, state.tpot_bound_s[rows] * state.l_out[rows], bound_s)
        tokens = (view.target_tokens[rows] - view.computed_tokens[rows]).astype(np.float64)
        prefill_s = alone_s(view.profile, tokens, view.computed_tokens[rows])
        predicted = (elapsed_s + prefill_s) / bound_s
        order = _largest_first(predicted, view, rows)
        self.rows: Rows = rows[order]
        self.tokens: Floats = tokens[order]
        self.begun: Bools = view.phase[self.rows] == chunk.PREFILL
        spare_s = np.where(view.best_effort[rows], math.inf, bound_s - elapsed_s - prefill_s)
        self.spare_s: Floats = spare_s[order]  # time until it must begin; inf: never

    @property
    def urgent(self) -> bool:
        """Tells whether any prefill has a deadline."""
        return bool((self.spare_s < math.inf).any())


def _largest_first(predicted: Floats, view: View, rows: Rows) -> Indices:
    """The order of these rows: best-effort ones last, then the largest `predicted` first, then by
    arrival, then by slot. The latter are read only where two values are equal.
    """
    best_effort = view.best_effort[rows]
    if not np.count_nonzero(best_effort):
        order: Indices = (-predicted).argsort()
        falling = predicted[order]
        if np.count_nonzero(falling[1:] < falling[:-1]) == len(order) - 1:
            return order
    return np.lexsort((view.slot[rows], view.arrived_unix_s[rows], -predicted, best_effort))
