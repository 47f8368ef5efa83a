"""Learns the output lengths of each application from ended requests (QoServe section 3.4)."""

from collections.abc import Sequence

import numpy as np

from shared.policy.seam import Ended, Floats

# An application is unknown until so many of its requests have ended.
MIN_ENDS = 10
# The upper estimate for unknown applications: the largest p90 of QoServe Table 2 (ShareGPT).
PRIOR_TOKENS = 834.0
# Callers choose application names; applications beyond this many stay unknown.
MAX_APPLICATIONS = 4096
SIGMAS = 2.0  # QoServe section 3.4


class OutputLengths:
    """Running mean and deviation of output tokens per application (Welford)."""

    def __init__(self) -> None:
        # ends, mean, sum of squared deviations
        self._seen: dict[str, tuple[int, float, float]] = {}
        self._upper: dict[str, float] = {}
        self._mean: dict[str, float] = {}

    def observe(self, ended: Ended) -> None:
        if ended.application not in self._seen and len(self._seen) >= MAX_APPLICATIONS:
            return
        n, mean, squares = self._seen.get(ended.application, (0, 0.0, 0.0))
        n += 1
        off = ended.output_tokens - mean
        mean += off / n
        squares += off * (ended.output_tokens - mean)
        self._seen[ended.application] = (n, mean, squares)
        if n >= MIN_ENDS:
            self._mean[ended.application] = mean
            self._upper[ended.application] = mean + SIGMAS * (squares / (n - 1)) ** 0.5

    def upper(self, applications: Sequence[str]) -> Floats:
        """Mean + 2 sigma of each application; the prior for an unknown one."""
        return np.array([self._upper.get(a, PRIOR_TOKENS) for a in applications], dtype=np.float64)

    def mean(self, applications: Sequence[str]) -> Floats:
        """The mean of each application; 0 for an unknown one, so that no request is given up on a
        guess.
        """
        return np.array([self._mean.get(a, 0.0) for a in applications], dtype=np.float64)
