"""The abilities that only some engines have: engines announce theirs, and requests need some."""

from collections.abc import Collection
from typing import Protocol

from shared.schemas import Sampling

LOGPROBS = "logprobs"
PENALTIES = "penalties"  # for presence, frequency and repetition
MIN_P = "min_p"
MIN_TOKENS = "min_tokens"
LOGIT_BIAS = "logit_bias"
STRUCTURED = "structured"
ALL = frozenset({LOGPROBS, PENALTIES, MIN_P, MIN_TOKENS, LOGIT_BIAS, STRUCTURED})

# followed by the adapter's name; not in ALL, since replicas announce adapters separately
ADAPTER = "adapter:"


class Able(Protocol):
    """A replica's model and abilities: an Announce or a Digest."""

    @property
    def model(self) -> str: ...

    @property
    def features(self) -> Collection[str]: ...

    @property
    def adapters(self) -> Collection[str]: ...


def needs(sampling: Sampling, adapter: str = "") -> frozenset[str]:
    """The needs of a request: abilities that its replica must have. `adapter`: "" for none."""
    asked = {
        need
        for need, params in PARAMS.items()
        if any(getattr(sampling, name) != getattr(_NEUTRAL, name) for name in params)
    }
    return frozenset(asked | {ADAPTER + adapter} if adapter else asked)


def abilities(replica: Able) -> frozenset[str]:
    """Every need that a replica meets."""
    return frozenset([*replica.features, *(ADAPTER + name for name in replica.adapters)])


def meets(replica: Able, needed: Collection[str]) -> bool:
    return not needed or abilities(replica).issuperset(needed)


def serves(replica: Able, model: str, needed: Collection[str]) -> bool:
    """True if it is a replica of this model ("": any) and meets the needs."""
    return model in ("", replica.model) and meets(replica, needed)


def param(need: str, sampling: Sampling) -> str:
    """The request's parameter behind a need, under the name that clients use."""
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
