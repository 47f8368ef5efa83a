"""A virtual worker's record of each request, beside its columns, and its counters."""

from array import array
from dataclasses import dataclass

from shared.schemas import Record
from shared.vocabulary import ServiceClass


@dataclass(slots=True)
class Counters:
    """The sums since the worker's start."""

    iterations: int = 0
    tokens: int = 0
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # of these
    verifications: int = 0  # entries that had drafts verified
    exec_s: float = 0.0
    idle_s: float = 0.0


@dataclass(slots=True)
class HeldRequest:
    """A request that the worker holds."""

    record: Record
    times: "array[float]"
    reason: str  # of its end, once all of its output is made here
    service_class: ServiceClass
    relegated: bool
    thinking_tokens: int | None  # as in Measure
    had: int = 0  # positions that were filled when its KV left
