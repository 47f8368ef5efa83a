"""Ascendra's performance model: five coefficients over the seconds of memory and of compute,
refitted while serving (section 5.1).

Eq. 5: t = C1 (tM + tF) + C2 max(tM, tF) + C3 tM + C4 tF + C5, from the bytes M and the FLOPs F of
the batch (Eq. 1-3, appendix A).

Where this differs from the paper:
- C1 cannot be told from C3 and C4, since tM + tF is the sum of their terms: the fit leaves it 0.
- A policy knows neither architecture nor hardware, so M/M_H and F/F_H are read off the profile the
  replica began with: the time that weights, a cached token, a new token and a query-key pair take
  there. The coefficients correct a wrong scale of either. M has no part for the queries that
  attention reads again for each block of keys (l / b in Eq. 1).
- The squared error minimised is the relative one, no coefficient is below 0 (so that it can be
  inverted), and old batches fade.
- Only batches with prefill are learned from. The model predicts prefills, and batches of only
  decodes would outnumber them by far.
- Until enough has been seen, and while it is further off than the 10 % the paper states, the
  replica's own profile stands in.
"""

from dataclasses import replace
from math import exp

import numpy as np

from shared.perf.fitting import non_negative
from shared.perf.five_coefficients import AscendraProfile
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape

# Section 5.1: five minutes of serving are enough to be within 10 %. Batches are remembered for this
# long, and the fit must be this exact.
MEMORY_S = 300.0
LARGEST_ERROR = 0.1
# Ours: batches before the first fit, seconds between fits, weight of a batch in the error.
LEAST_BATCHES = 64
EVERY_S = 5.0
SMOOTHED = 0.02
# Ours: the batches for which the profile is asked, to find its units.
CONTEXT_TOKENS, CHUNK_TOKENS, LARGE_TOKENS = 65_536, 512, 2048


def units_of(profile: Profile) -> AscendraProfile:
    """The form without coefficients: tM and tF in what `profile` takes for the weights, a cached
    token, a new token and a pair.
    """
    batch_s, chunk = profile.batch_s, BatchShape().with_chunk
    weights_s = batch_s(BatchShape(decodes=1))
    kv_token_s = (
        batch_s(BatchShape(decodes=1, decode_context=CONTEXT_TOKENS)) - weights_s
    ) / CONTEXT_TOKENS
    pair_s = (batch_s(chunk(CHUNK_TOKENS, CONTEXT_TOKENS)) - batch_s(chunk(CHUNK_TOKENS, 0))) / (
        CHUNK_TOKENS * CONTEXT_TOKENS
    )
    tokens_s = batch_s(chunk(2 * LARGE_TOKENS, 0)) - batch_s(chunk(LARGE_TOKENS, 0))
    return AscendraProfile(
        "ascendra",
        both=0.0,
        memory=0.0,
        compute=0.0,
        base_s=0.0,
        weights_s=weights_s,
        kv_token_s=max(kv_token_s, 0.0),
        # each further token of the longer chunk has this many pairs on average
        token_s=max(tokens_s / LARGE_TOKENS - 1.5 * LARGE_TOKENS * pair_s, 0.0),
        pair_s=max(pair_s, 0.0),
    )


class Refitted:
    """The model in use. The same batches in the same order give the same predictions."""

    def __init__(self) -> None:
        self._units: AscendraProfile | None = None
        self._parts: tuple[AscendraProfile, ...] = ()
        self._gram = np.zeros((4, 4))  # of the rows (max, tM, tF, 1) / t
        self._sums = np.zeros(4)
        self._batches = 0
        self._fitted: AscendraProfile | None = None
        self._fitted_unix_s = 0.0
        self._error = 0.0

    def now(self, given: Profile) -> Profile:
        """The refitted model if there is one to trust, else `given`, the replica's own."""
        if self._units is None:
            self._units = units_of(given)
            self._parts = (
                replace(self._units, both=1.0),
                replace(self._units, memory=1.0),
                replace(self._units, compute=1.0),
            )
        return given if self._fitted is None or self._error > LARGEST_ERROR else self._fitted

    @property
    def fitted(self) -> AscendraProfile | None:
        """The last fit, trusted or not."""
        return self._fitted

    @property
    def error(self) -> float:
        """|predicted - measured| / measured of late batches, each predicted before it was learned
        from; 0 before the first fit.
        """
        return self._error

    def observe(self, shape: BatchShape, exec_s: float, at_unix_s: float) -> None:
        if not self._parts or not shape.prefill_tokens or exec_s <= 0:
            return
        if self._fitted is not None:
            self._error += SMOOTHED * (abs(self._fitted.batch_s(shape) / exec_s - 1) - self._error)
        row = np.array([*(part.batch_s(shape) for part in self._parts), 1.0]) / exec_s
        self._gram += np.outer(row, row)
        self._sums += row
        self._batches += 1
        if self._batches >= LEAST_BATCHES and at_unix_s >= self._fitted_unix_s + EVERY_S:
            self._fit(at_unix_s)

    def _fit(self, at_unix_s: float) -> None:
        if self._fitted is not None:
            kept = exp(-(at_unix_s - self._fitted_unix_s) / MEMORY_S)
            self._gram *= kept
            self._sums *= kept
        # |A x - 1| over all rows is least where |R x - b| is, with R'R = A'A and R'b = A'1: four
        # rows instead of thousands.
        values, vectors = np.linalg.eigh(self._gram)
        roots = np.sqrt(values[sound := values > 1e-12 * values[-1]])
        both, memory, compute, base_s = non_negative(
            roots[:, None] * vectors.T[sound], vectors.T[sound] @ self._sums / roots
        ).tolist()
        assert self._units is not None
        self._fitted = replace(
            self._units, both=both, memory=memory, compute=compute, base_s=base_s
        )
        self._fitted_unix_s = at_unix_s
