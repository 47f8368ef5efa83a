"""Simulates replicas that are not what the planner takes them for: engines slower or faster than
their profile, and outputs longer or shorter than those that the policy learns from.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from shared.perf.shape import BatchShape
from shared.policy.seam import Admission, Choice, Observation, Policy, View
from shared.schemas import Offer

BatchTime = Callable[[BatchShape], float]  # the seconds that an engine takes for a batch


def stretched(batch_s: BatchTime, times: float) -> BatchTime:
    """The batch time of an engine in which every iteration takes `times` as long."""
    return lambda shape: times * batch_s(shape)


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
