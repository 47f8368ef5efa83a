"""Replicas that are not what the planner takes them for: engines that are slower or faster than the
profile says, all the time or from one iteration to the next, or to which drafts are dearer; and
outputs longer or shorter than those that the policy learns from.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Admission, Choice, Observation, Policy, View
from shared.schemas import Offer


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine that the planner knows by this profile, and that takes `times` as long in part."""

    profile: Profile
    times: float

    @property
    def name(self) -> str:
        return self.profile.name


@dataclass(frozen=True, slots=True)
class Stretched(_Engine):
    """Every iteration takes `times` as long."""

    def batch_s(self, shape: BatchShape) -> float:
        return self.times * self.profile.batch_s(shape)

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return self.profile.prefill_budget(shape, cached, budget_s / self.times, limit)


# By the size of iterations: what they take over what is predicted, one after the other.
Scatter = Mapping[int, Sequence[float]]


def size_of(shape: BatchShape) -> int:
    """The number of binary digits of an iteration's tokens. A stall of a millisecond is much of a
    short iteration, and little of a long one.
    """
    return (shape.prefill_tokens + shape.decodes).bit_length()


class Scattered:
    """Each iteration takes as many times as long as the next of the `times` of its size says, or of
    the nearest size that has any. After the last comes the first again.
    """

    def __init__(self, profile: Profile, times: Scatter) -> None:
        self.name = profile.name
        self._profile = profile
        self._times = {size: cycle(each) for size, each in times.items()}

    def batch_s(self, shape: BatchShape) -> float:
        """The seconds of the next iteration."""
        size = size_of(shape)
        nearest = min(self._times, key=lambda known: abs(known - size))
        return next(self._times[nearest]) * self._profile.batch_s(shape)

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return self._profile.prefill_budget(shape, cached, budget_s, limit)


@dataclass(frozen=True, slots=True)
class DearDrafts(_Engine):
    """Drafts, in iterations of decodes alone, take `times` as long to verify."""

    def batch_s(self, shape: BatchShape) -> float:
        whole_s = self.profile.batch_s(shape)
        if shape.prefills or not shape.prefill_tokens:
            return whole_s
        plain_s = self.profile.batch_s(
            BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)
        )
        return plain_s + self.times * (whole_s - plain_s)

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return self.profile.prefill_budget(shape, cached, budget_s, limit)


class MisjudgedLengths:
    """A policy that sees the outputs of ended requests `times` as long as they were."""

    def __init__(self, policy: Policy, times: float) -> None:
        self.name, self.declared = policy.name, policy.declared
        self._policy, self._times = policy, times

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return self._policy.admit(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        return self._policy.plan(view)

    def observe(self, seen: Observation) -> None:
        ended = [
            replace(each, output_tokens=round(self._times * each.output_tokens))
            for each in seen.ended
        ]
        self._policy.observe(replace(seen, ended=ended))
