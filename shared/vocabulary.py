"""The types that all code shares, and the units in names (docs/architecture.md has all words).

_s         duration in seconds
_unix_s    instant: wall clock at process start plus monotonic time since (see shared/clock.py),
           so it never jumps within a process and is comparable between processes
_tokens    token count; _blocks  KV-cache blocks
"""

import math
from enum import StrEnum
from typing import Annotated, NewType

from msgspec import Meta, Struct

RequestKey = NewType("RequestKey", str)  # "<tenant>.<request_id>": names a request everywhere
ReplicaId = NewType("ReplicaId", str)
MOST_REPLICAS = 1024  # while it hears of so many, a service takes in no further replica
MOST_DRAFTS = 64  # of one request: levels of its drafts, and nodes of one level
Slot = NewType("Slot", int)  # names a request between one planner and one worker

Count = Annotated[int, Meta(ge=0, lt=2**31)]  # what an int32 column holds
FromOne = Annotated[int, Meta(ge=1, lt=2**31)]  # the same, and not 0
SlotCount = Annotated[int, Meta(ge=0, le=65_536)]  # of one replica: its planner has a row for each

# A shorter or longer bound would promise nothing.
SHORTEST_S, LONGEST_S = 1e-4, 31_536_000.0
Seconds = Annotated[float, Meta(ge=SHORTEST_S, le=LONGEST_S)]
Multiple = Annotated[float, Meta(ge=1e-3, le=1e6)]  # of a zero-load time


class ServiceClass(StrEnum):
    """Standard: the SLO is held. Best-effort: it is relegated, and finished with what is left."""

    STANDARD = "standard"
    BEST_EFFORT = "best_effort"


class Role(StrEnum):
    """The part of a request that a replica serves (docs/apart.md)."""

    BOTH = "both"
    PREFILL = "prefill"  # requests go on elsewhere once their prompts are computed
    DECODE = "decode"  # requests whose prompts others have computed
    AUTO = "auto"  # both or prefill, as the load asks for


# Why a replica gives a request up whose prompt it has computed, as its record says.
HANDED_OVER = "handed over"


class RecordState(StrEnum):
    """The state of a record as stored; shared/core/record/record.py has every change. ACTIVE is
    stored as "placing", an older word, so that records written before an upgrade stay readable.
    `Record.replica` says whether a request has a place (see `record.state_of`). Whether that
    replica holds it only the worker knows: to store it would take one more write per request.
    """

    ACTIVE = "placing"  # an admission looks for a place, or the record names one
    RELEGATED = "relegated"  # in the best-effort pool
    ENDED = "ended"


class FinishReason(StrEnum):
    """The reason why a request ended; `stop` and `length` are the only good ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"
    # the engine cannot do what is asked for (a grammar, say): another try would not help
    INVALID = "invalid"
    DROPPED = "dropped"  # by a policy that declares that it drops
    REFUSED = "refused"  # no capacity, and the caller did not want best-effort


class Definition(StrEnum):
    """The definition by which an SLO counts as met (shared/core/record/judgement.py)."""

    DEADLINE = "deadline"
    MEAN_TPOT = "mean-tpot"
    MAX_TPOT_10 = "max-tpot-10"
    TTLT = "ttlt"
    EVERY_GAP = "every-gap"


class Missed(StrEnum):
    """The bound that was broken, the first that applies. TBT: the pace, by any definition."""

    NOTHING = ""  # the SLO was met
    END = "unfinished"  # the request did not finish
    TTFT = "ttft"
    TBT = "tbt"
    TTLT = "ttlt"


class Slo(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The service level objective of one request. Any bound may be absent; the earliest deadline
    governs.

    `*_x` gives a bound as a multiple of its zero-load time; admission resolves it to seconds. A
    request whose SLO names `thinking_tbt_s` thinks first: that is its pace up to and including the
    end-of-thinking token, and `tbt_s` its pace after it. The stages of other requests are not
    followed, since nothing depends on them.
    """

    ttft_s: Seconds | None = None
    """Time to first token, from arrival."""
    tbt_s: Seconds | None = None
    """Time between tokens."""
    ttlt_s: Seconds | None = None
    """Time to last token, from arrival."""
    thinking_tbt_s: Seconds | None = None
    """Time between tokens while the model thinks."""
    task_ttlt_s: Seconds | None = None
    """Time to last token of a session's last round, from the arrival of its first (docs/tasks.md).
    """
    ttft_x: Multiple | None = None
    """Time to first token, in multiples of that at zero load."""
    tbt_x: Multiple | None = None
    """Time between tokens, in multiples of that at zero load."""
    ttlt_x: Multiple | None = None
    """Time to last token, in multiples of that at zero load."""
    definition: Definition = Definition.DEADLINE
    """When it counts as met: deadline, mean-tpot, max-tpot-10, ttlt or every-gap."""
    long_gap_share: Annotated[float, Meta(gt=0.0, lt=1.0)] | None = None
    """The part of a request's gaps between tokens that may be longer than its pace, by `every-gap`;
    none where it is absent.
    """

    @property
    def in_multiples(self) -> bool:
        """True if a bound is a multiple of zero-load time."""
        return (self.ttft_x, self.tbt_x, self.ttlt_x) != (None, None, None)

    @property
    def bounds_nothing(self) -> bool:
        return self == Slo(definition=self.definition, long_gap_share=self.long_gap_share)

    @property
    def interactive(self) -> bool:
        """True for an SLO of first token and pace, not of the end (QoServe section 3.2)."""
        return self.ttft_s is not None

    @property
    def thinks(self) -> bool:
        return self.thinking_tbt_s is not None

    def pace_s(self, thinking: bool) -> float:
        """Time between the deadlines of two tokens in this stage; inf if the SLO names no pace."""
        bound_s = self.thinking_tbt_s if thinking else self.tbt_s
        return math.inf if bound_s is None else bound_s

    def tightest_pace_s(self, thinking: bool) -> float:
        """The shortest pace of this stage and those still to come; inf if none has a pace."""
        return min(self.pace_s(True), self.pace_s(False)) if thinking else self.pace_s(False)

    def first_due_unix_s(self, arrived_unix_s: float) -> float:
        """The deadline of token 1 (QoServe Eq. 1); inf without a TTFT."""
        return arrived_unix_s + self.ttft_s if self.ttft_s is not None else math.inf

    def last_due_unix_s(self, arrived_unix_s: float) -> float:
        """The deadline of the last token (QoServe Eq. 3); inf without a TTLT."""
        return arrived_unix_s + self.ttlt_s if self.ttlt_s is not None else math.inf

    def resolved(
        self, *, zero_load_ttft_s: float, zero_load_tbt_s: float, zero_load_ttlt_s: float
    ) -> "Slo":
        """The SLO in seconds, SHORTEST_S to LONGEST_S; of a bound given twice, the tighter."""

        def tighter(
            bound_s: float | None, multiple: float | None, zero_load_s: float
        ) -> float | None:
            bounds = [
                b
                for b in (bound_s, None if multiple is None else multiple * zero_load_s)
                if b is not None
            ]
            return min(max(min(bounds), SHORTEST_S), LONGEST_S) if bounds else None

        return Slo(
            ttft_s=tighter(self.ttft_s, self.ttft_x, zero_load_ttft_s),
            tbt_s=tighter(self.tbt_s, self.tbt_x, zero_load_tbt_s),
            ttlt_s=tighter(self.ttlt_s, self.ttlt_x, zero_load_ttlt_s),
            thinking_tbt_s=self.thinking_tbt_s,
            task_ttlt_s=self.task_ttlt_s,
            definition=self.definition,
            long_gap_share=self.long_gap_share,
        )
