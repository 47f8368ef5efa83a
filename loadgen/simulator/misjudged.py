"""Replicas that are not what the planner takes them for: engines that are slower or faster than the
profile says, all the time or from one iteration to the next, or to which drafts are dearer; and
outputs longer or shorter than those that the policy learns from.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from shared.perf.shape import BatchShape
from shared.policy.seam import Admission, Choice, Observation, Policy, View
from shared.schemas import Offer

BatchTime = Callable[[BatchShape], float]  # the seconds that an engine takes for a batch
# By the size of iterations: what they take over what is predicted, one after the other.
Scatter = Mapping[int, Sequence[float]]


def stretched(batch_s: BatchTime, times: float) -> BatchTime:
    """Every iteration takes `times` as long."""
    return lambda shape: times * batch_s(shape)


def size_of(shape: BatchShape) -> int:
    """The number of binary digits of an iteration's tokens. A stall of a millisecond is much of a
    short iteration, and little of a long one.
    """
    return (shape.prefill_tokens + shape.decodes).bit_length()


def scattered(batch_s: BatchTime, times: Scatter) -> BatchTime:
    """Each iteration takes as many times as long as the next of the `times` of its size says, or of
    the nearest size that has any. After the last comes the first again.
    """
    cycles = {size: cycle(each) for size, each in times.items()}

    def found_s(shape: BatchShape) -> float:
        size = size_of(shape)
        nearest = min(cycles, key=lambda known: abs(known - size))
        return next(cycles[nearest]) * batch_s(shape)

    return found_s


def with_dear_drafts(batch_s: BatchTime, times: float) -> BatchTime:
    """Drafts, in iterations of decodes alone, take `times` as long to verify."""

    def found_s(shape: BatchShape) -> float:
        whole_s = batch_s(shape)
        if shape.prefills or not shape.prefill_tokens:
            return whole_s
        plain = BatchShape(decodes=shape.decodes, decode_context=shape.decode_context)
        plain_s = batch_s(plain)
        return plain_s + times * (whole_s - plain_s)

    return found_s


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
