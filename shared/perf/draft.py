"""The cost of a draft model beside its target: of a draft step, and of reading a prompt."""

from dataclasses import dataclass

from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape

# (step, read), the two fractions of `Draft`; one number stands for both. 0: there is no draft model
DraftCost = float | tuple[float, float]
DRAFT = 0.05  # where a profile states none: a choice of ours


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model of the target with profile `of`, as fractions of the target's times: `step`
    for a draft step of the same decodes, `read` for one more prompt token.
    """

    of: Profile
    step: float
    read: float

    def step_s(self, shape: BatchShape) -> float:
        """Seconds of one draft step for these decodes."""
        return self.step * self.of.batch_s(shape)

    def read_s(self, shape: BatchShape) -> float:
        """Seconds of the first step, which also reads. `shape`'s prefill tokens are those that the
        draft's KV lacks: the first costs a step, each further one `read`.
        """
        whole_s = self.of.batch_s(shape)
        if self.read == self.step or not shape.prefill_tokens:
            return self.step * whole_s
        least_s = self.of.batch_s(
            BatchShape(1, decodes=shape.decodes, decode_context=shape.decode_context)
        )
        return self.step * least_s + self.read * (whole_s - least_s)


def draft_of(profile: Profile, cost: DraftCost) -> Draft | None:
    """The target's draft model; None for a step of 0. Raises ConfigError outside of [0, 1]."""
    step, read = cost if isinstance(cost, tuple) else (cost, cost)
    if not (0 <= step <= 1 and 0 <= read <= 1):
        raise ConfigError(
            f"draft {step:g}, {read:g}: a step and what is read are fractions of the target's "
            "time, from 0 to 1; a step of 0 means no draft"
        )
    return Draft(profile, step, read) if step else None
