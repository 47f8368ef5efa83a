"""A profile that is a fraction of another one: each iteration of a draft model costs a fixed
fraction of the target's.
"""

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape


@dataclass(frozen=True, slots=True)
class Scaled:
    """Implements shared.perf.iteration_time.Profile. `fraction` is above 0."""

    of: Profile
    fraction: float

    @property
    def name(self) -> str:
        return f"{self.fraction:g} of {self.of.name}"

    def batch_s(self, shape: BatchShape) -> float:
        return self.fraction * self.of.batch_s(shape)

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return self.of.prefill_budget(shape, cached, budget_s / self.fraction, limit)


def draft_of(profile: Profile, fraction: float) -> Profile | None:
    """The draft model of this target; None for a fraction of 0, which means no draft. Raises
    ConfigError unless the fraction is in [0, 1].
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(
            f"draft {fraction:g}: the fraction of the target's time that a draft step takes is "
            "from 0 (no draft) to 1"
        )
    return Scaled(profile, fraction) if fraction else None
