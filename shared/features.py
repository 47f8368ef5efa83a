"""What engines may or may not be able to do for a request, by name: what they announce, and what a
request needs.

What every engine does (temperature, top_p, top_k, stop strings ...) has no name here.
"""

from collections.abc import Collection
from typing import Protocol

from shared.schemas import Sampling

LOGPROBS = "logprobs"
PENALTIES = "penalties"  # presence, frequency and repetition
MIN_P = "min_p"
MIN_TOKENS = "min_tokens"
LOGIT_BIAS = "logit_bias"
STRUCTURED = "structured"
ALL = frozenset({LOGPROBS, PENALTIES, MIN_P, MIN_TOKENS, LOGIT_BIAS, STRUCTURED})

# followed by its name; not one of ALL, since a replica announces its adapters by themselves
ADAPTER = "adapter:"


class Able(Protocol):
    """An Announce or a Digest."""

    @property
    def features(self) -> Collection[str]: ...

    @property
    def adapters(self) -> Collection[str]: ...


def needs(sampling: Sampling, adapter: str = "") -> frozenset[str]:
    """What a replica must have to serve this as asked. `adapter`: "" for none."""
    asked = {
        need
        for need, params in PARAMS.items()
        if any(getattr(sampling, name) != getattr(_NEUTRAL, name) for name in params)
    }
    return frozenset(asked | {ADAPTER + adapter} if adapter else asked)


def abilities(replica: Able) -> frozenset[str]:
    """Every need that it meets."""
    return frozenset([*replica.features, *(ADAPTER + name for name in replica.adapters)])


def meets(replica: Able, needed: Collection[str]) -> bool:
    return not needed or abilities(replica).issuperset(needed)


def param(need: str, sampling: Sampling) -> str:
    """The parameter that asked for it, as clients call it."""
    if need.startswith(ADAPTER):
        return "adapter"
    return next(name for name in PARAMS[need] if getattr(sampling, name) != getattr(_NEUTRAL, name))


PARAMS = {
    LOGPROBS: ("logprobs",),
    PENALTIES: ("presence_penalty", "frequency_penalty", "repetition_penalty"),
    MIN_P: ("min_p",),
    MIN_TOKENS: ("min_tokens",),
    LOGIT_BIAS: ("logit_bias",),
    STRUCTURED: ("structured",),
}
_NEUTRAL = Sampling()
