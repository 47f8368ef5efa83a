"""How long prompts and outputs are: named synthetic workloads, and the rows of a trace."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import NamedTuple, Protocol

from loadgen.trace import Trace
from shared.errors import ConfigError

NORMAL = NormalDist()
REDRAWS = 1000  # of a pair that a context cannot hold; the built-in workloads need two or three


class Lengths(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    application: str


class LengthSource(Protocol):
    """Where the lengths of request `index` come from; `rank` is its tier's place in the set, tightest first."""

    def draw(self, index: int, rank: int, rng: Random) -> Lengths: ...


@dataclass(frozen=True, slots=True)
class TruncatedLognormal:
    """exp(mu + sigma Z), no more than `maximum`, rounded up to 1 token at least."""

    mu: float
    sigma: float
    maximum: int

    @staticmethod
    def fit(p50: float, p90: float, maximum: int) -> "TruncatedLognormal":
        """The one whose median and 90th percentile, *after* truncation, are these. Raises ValueError if there is none.

        With q the part of the untruncated law that is kept, the quantiles are at z(0.5 q) and z(0.9 q); q is found by bisection.
        """

        def law(kept: float) -> tuple[float, float]:
            low, high = NORMAL.inv_cdf(0.5 * kept), NORMAL.inv_cdf(0.9 * kept)
            sigma = math.log(p90 / p50) / (high - low)
            return math.log(p50) - sigma * low, sigma

        def excess(kept: float) -> float:
            mu, sigma = law(kept)
            return NORMAL.cdf((math.log(maximum) - mu) / sigma) - kept

        few, many = 1e-3, 1.0
        if not (0 < p50 < p90 < maximum and excess(few) > 0):
            raise ValueError(f"no truncated lognormal has p50 {p50}, p90 {p90} and maximum {maximum}")
        for _ in range(60):
            kept = (few + many) / 2
            few, many = (kept, many) if excess(kept) > 0 else (few, kept)
        mu, sigma = law(few)
        return TruncatedLognormal(mu, sigma, maximum)

    def draw(self, rng: Random) -> int:
        kept = NORMAL.cdf((math.log(self.maximum) - self.mu) / self.sigma)
        z = NORMAL.inv_cdf(max(1e-12, rng.random() * kept))
        return max(1, min(self.maximum, round(math.exp(self.mu + self.sigma * z))))


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and output lengths of one application, independent of each other (their correlation is near zero in the records)."""

    application: str
    prompt: TruncatedLognormal
    output: TruncatedLognormal

    def pair(self, rng: Random, context_tokens: int) -> Lengths:
        """Drawn again while the context cannot hold both. Raises ConfigError if nothing ever fits."""
        for _ in range(REDRAWS):
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            if prompt + output <= context_tokens:
                return Lengths(prompt, output, self.application)
        raise ConfigError(f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens")


# Medians and 90th percentiles of QoServe Table 2. The maxima are ours: the published ones are not given, ShareGPT's filtered
# file ends at 8,032 and 1,024, and Llama-3-8B's context is 8,192.
SHAREGPT = Shape("sharegpt", TruncatedLognormal.fit(1730, 5696, 8192), TruncatedLognormal.fit(415, 834, 1024))
AZURE_CONV = Shape("azure-conv", TruncatedLognormal.fit(928, 3830, 8192), TruncatedLognormal.fit(41, 342, 1024))
AZURE_CODE = Shape("azure-code", TruncatedLognormal.fit(1930, 6251, 8192), TruncatedLognormal.fit(8, 43, 1024))

# The same at a quarter of the length, for small models: their contexts are short and their machines slow.
SHORT_SHAREGPT = Shape("sharegpt", TruncatedLognormal.fit(432, 1424, 2048), TruncatedLognormal.fit(104, 208, 256))
SHORT_AZURE_CONV = Shape("azure-conv", TruncatedLognormal.fit(232, 957, 2048), TruncatedLognormal.fit(10, 85, 256))
SHORT_AZURE_CODE = Shape("azure-code", TruncatedLognormal.fit(482, 1562, 2048), TruncatedLognormal.fit(2, 11, 256))

# By rank of the tier, tightest first; the last one stands for all tiers beyond.
WORKLOADS: Mapping[str, Sequence[Shape]] = {
    "azure-code": (AZURE_CODE,),
    "azure-conv": (AZURE_CONV,),
    "sharegpt": (SHAREGPT,),
    "mix": (AZURE_CODE, AZURE_CONV, SHAREGPT),
    "short-mix": (SHORT_AZURE_CODE, SHORT_AZURE_CONV, SHORT_SHAREGPT),
}


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A named workload within a context. Redrawing what does not fit moves the percentiles down a little."""

    shapes: Sequence[Shape]
    context_tokens: int

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        return self.shapes[min(rank, len(self.shapes) - 1)].pair(rng, self.context_tokens)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a trace: at random, or (`in_order`) the index-th row for request `index`, for recorded arrivals."""

    trace: Trace
    in_order: bool

    def draw(self, index: int, rank: int, rng: Random) -> Lengths:
        rows = self.trace.rows
        row = rows[index] if self.in_order else rows[rng.randrange(len(rows))]
        return Lengths(row.prompt_tokens, row.output_tokens, row.application)


def named_workload(name: str, context_tokens: int) -> Synthetic:
    """Raises ConfigError for a name that is not built in."""
    shapes = WORKLOADS.get(name)
    if shapes is None:
        raise ConfigError(f"workload `{name}` is not built in; there are {', '.join(WORKLOADS)}")
    return Synthetic(shapes, context_tokens)
