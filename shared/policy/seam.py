"""The seam between the books of a replica (shared/policy/replica.py) and a policy.

The core shows a policy the *predicted view*: the replica as it will be when the plans already in flight are done.
The policy answers with choices. It holds learned statistics only; what it decides about a request is written in the books
(class, phase) and comes back in the next view, so any planner can go on from any point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.columns import EMPTY, Ints
from shared.perf.profile import Profile
from shared.schemas import Digest, Offer, Selection
from shared.vocabulary import ReplicaId

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class Phase(IntEnum):
    """WAITING: nothing computed. PREFILL: some of target_tokens computed. DECODE: an output token per computed token."""

    WAITING = 0
    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class View:
    """The replica when the next plan starts. Row arrays run in parallel; row order is arbitrary but reproducible.

    Read-only: policies must not write into the arrays. With speculation or stops a plan in flight may yield more or fewer
    tokens than `generated_tokens` says: `unsure_tokens` is how many more there can be (0 without speculation).
    """

    start_unix_s: float  # when the next iteration is predicted to begin
    profile: Profile
    kv_blocks: int  # capacity
    kv_free_blocks: int  # after everything in flight
    block_tokens: int
    context_tokens: int

    slot: Ints
    phase: Ints
    target_tokens: Ints  # to compute before the next output token: prompt, plus what was generated before a preemption
    computed_tokens: Ints  # KV positions filled
    generated_tokens: Ints  # output so far, all attempts
    unsure_tokens: Ints
    max_tokens: Ints
    kv_held_blocks: Ints
    application: Ints  # index into `applications`
    arrived_unix_s: Floats
    first_due_unix_s: Floats  # arrived + TTFT; inf without one
    next_due_unix_s: Floats  # deadline of the next owed token; inf without one
    last_due_unix_s: Floats  # arrived + TTLT; inf without one
    tbt_s: Floats  # inf without one
    importance: Floats
    best_effort: Bools
    applications: Sequence[str]

    @property
    def rows(self) -> int:
        return len(self.slot)

    @property
    def prefill_left(self) -> Ints:
        """Tokens to compute before the next output token; 0 for decodes."""
        left: Ints = np.where(self.phase == Phase.DECODE, 0, self.target_tokens - self.computed_tokens)
        return left


@dataclass(frozen=True, slots=True)
class Choice:
    """One iteration. Entries in the order in which they claim KV: if blocks run short, the core cuts from the end.

    slots, caps: int32, parallel. A decode's cap is 1 (or, speculating, its verified tokens); a prefill's, its chunk.
    Class changes and releases take effect before the entries; a slot named there may still be an entry, unless released.
    A relegated slot that has not begun leaves the replica for the relegation service; the core sees to that.
    """

    slots: Ints = field(default_factory=lambda: EMPTY)
    caps: Ints = field(default_factory=lambda: EMPTY)
    preempt: Sequence[int] = ()  # slots whose KV goes; tokens kept, prefill again later
    relegate: Sequence[int] = ()
    promote: Sequence[int] = ()
    release: Sequence[tuple[int, str]] = ()  # (slot, "offloaded" | "dropped")
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A policy's answer to one offer. Accepted as offered, or declined; `earliest_s` from now, None if unknown."""

    accepted: bool
    earliest_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request left for good: what policies learn decode lengths from."""

    application: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Observation:
    """One acked iteration."""

    at_unix_s: float
    prefill_tokens: int
    decodes: int
    predicted_s: float
    exec_s: float
    ended: Sequence[Ended] = ()


class Policy(Protocol):
    """Pure decisions. `name` is how it is chosen on the command line."""

    name: str

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        """Answer offers that came together, jointly. One answer per offer, in order."""

    def plan(self, view: View) -> Sequence[Choice]:
        """1..H iterations, the first to run next. The rest is used while nothing but progress happens
        (an arrival, an end, a class change or a miss of the prediction makes the core ask again)."""

    def observe(self, seen: Observation) -> None:
        """Learn from an acked iteration."""

    def route(self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random) -> Sequence[ReplicaId]:
        """Replicas to offer to, best first. The caller has already debited its own recent offers from the digests."""
