"""How long prompts and outputs are: named synthetic workloads, and the rows of a trace."""

import math
from bisect import bisect_right
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


class Law(Protocol):
    """A distribution of token counts."""

    def draw(self, rng: Random) -> int:
        """One count, at least 1."""


@dataclass(frozen=True, slots=True)
class TruncatedLognormal:
    """exp(mu + sigma Z) between 1 and `maximum`, by the inverse of its distribution."""

    mu: float
    sigma: float
    maximum: int

    def draw(self, rng: Random) -> int:
        low, high = (NORMAL.cdf((math.log(bound) - self.mu) / self.sigma) for bound in (1, self.maximum))
        z = NORMAL.inv_cdf(_inside(low + rng.random() * (high - low)))
        return max(1, min(self.maximum, round(math.exp(self.mu + self.sigma * z))))


@dataclass(frozen=True, slots=True)
class TruncatedWeibull:
    """scale (-ln U)^(1/shape) between 1 and `maximum`, by the inverse of its distribution."""

    shape: float
    scale: float
    maximum: int

    def draw(self, rng: Random) -> int:
        low, high = (-math.expm1(-((bound / self.scale) ** self.shape)) for bound in (1, self.maximum))
        u = _inside(low + rng.random() * (high - low))
        tokens: float = self.scale * (-math.log1p(-u)) ** (1 / self.shape)
        return max(1, min(self.maximum, round(tokens)))


def _inside(p: float) -> float:
    """Where an inverse distribution is finite."""
    return min(max(p, 1e-12), 1 - 1e-12)


@dataclass(frozen=True, slots=True)
class Knots:
    """Linear between the quantiles `tokens` at the probabilities `p`, which rise from 0 to 1."""

    p: Sequence[float]
    tokens: Sequence[float]

    def draw(self, rng: Random) -> int:
        u = rng.random()
        i = bisect_right(self.p, u)
        share = (u - self.p[i - 1]) / (self.p[i] - self.p[i - 1])
        return max(1, round(self.tokens[i - 1] + share * (self.tokens[i] - self.tokens[i - 1])))


@dataclass(frozen=True, slots=True)
class Shorter:
    """A law divided by `times`."""

    law: Law
    times: int

    def draw(self, rng: Random) -> int:
        return max(1, round(self.law.draw(rng) / self.times))


@dataclass(frozen=True, slots=True)
class Shape:
    """Prompt and output lengths of one application, independent of each other (their correlation is near zero in the records)."""

    application: str
    prompt: Law
    output: Law

    def pair(self, rng: Random, context_tokens: int) -> Lengths:
        """Drawn again while the context cannot hold both. Raises ConfigError if nothing ever fits."""
        for _ in range(REDRAWS):
            prompt, output = self.prompt.draw(rng), self.output.draw(rng)
            if prompt + output <= context_tokens:
                return Lengths(prompt, output, self.application)
        raise ConfigError(f"workload {self.application}: nothing of it fits a context of {context_tokens} tokens")

    def shorter(self, times: int) -> "Shape":
        return Shape(self.application, Shorter(self.prompt, times), Shorter(self.output, times))


# The datasets of QoServe Table 2, each matched to its published median and 90th percentile.
#
# ShareGPT: quantiles of the filtered file that Sarathi and QoServe use (a 70 % sample of its lengths; Llama-2's tokenizer).
SHAREGPT_P = (
    0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.95,
    0.97, 0.98, 0.99, 0.995, 0.999, 1,
)  # fmt: skip
SHAREGPT_PROMPT = (
    1.0, 9.0, 12.0, 16.0, 29.0, 74.0, 185.0, 388.0, 591.0, 789.4, 981.0, 1212.0, 1477.1, 1730.0, 2086.0, 2422.0, 2828.0, 3253.0, 3756.0,
    4285.8, 4921.3, 5696.0, 6204.5, 6561.0, 6926.0, 7148.0, 7421.3, 7603.9, 7801.0, 8032.0,
)  # fmt: skip
SHAREGPT_OUTPUT = (
    2.0, 3.0, 6.0, 19.0, 47.0, 86.0, 134.0, 186.0, 233.0, 276.0, 316.0, 350.2, 384.0, 415.0, 459.0, 497.0, 534.7, 582.0, 629.0, 682.0,
    753.0, 834.0, 882.0, 919.0, 957.0, 976.0, 997.0, 1008.0, 1021.0, 1024.0,
)  # fmt: skip
SHAREGPT = Shape("sharegpt", Knots(SHAREGPT_P, SHAREGPT_PROMPT), Knots(SHAREGPT_P, SHAREGPT_OUTPUT))
# Azure 2024: the week that QoServe used is not at hand, so two published quantiles fix two parameters. The families and the maxima
# are assumed: a Weibull law for code, whose prompts end at 8,192 there and would be far too long as a lognormal one.
AZURE_CONV = Shape("azure-conv", TruncatedLognormal(6.8407, 1.1242, 16384), TruncatedLognormal(3.704, 1.7291, 2048))
AZURE_CODE = Shape("azure-code", TruncatedWeibull(0.712, 6187.06, 8192), TruncatedLognormal(1.9468, 1.3676, 2048))

# By rank of the tier, tightest first; the last one stands for all tiers beyond.
WORKLOADS: Mapping[str, Sequence[Shape]] = {
    "azure-code": (AZURE_CODE,),
    "azure-conv": (AZURE_CONV,),
    "sharegpt": (SHAREGPT,),
    "mix": (AZURE_CODE, AZURE_CONV, SHAREGPT),
    # For small models: their contexts are short and their machines slow.
    "short-mix": tuple(shape.shorter(4) for shape in (AZURE_CODE, AZURE_CONV, SHAREGPT)),
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
