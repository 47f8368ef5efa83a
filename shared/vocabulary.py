"""The words and their units (docs/architecture.md has the whole table).

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
Slot = NewType("Slot", int)  # names a request between one planner and one worker

Positive = Annotated[float, Meta(gt=0)]


class ServiceClass(StrEnum):
    """Standard: the SLO is held. Best-effort: the request is relegated, and finished with the
    capacity that is left.
    """

    STANDARD = "standard"
    BEST_EFFORT = "best_effort"


class RecordState(StrEnum):
    """The state of a record as it is stored; shared/core/record.py has every change of it.

    ACTIVE is stored as "placing", which is older than its meaning, so that records written before
    an upgrade stay readable. The stored state does not say whether an active request waits for a
    place or has one, since `Record.replica` says it; nor whether that replica holds it, since only
    the worker knows and recording it would cost one more write per request. `record.state_of`
    derives the first.
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
    # the engine cannot do what the request asks for (a grammar that does not compile, say): trying
    # again would not help
    INVALID = "invalid"
    DROPPED = "dropped"  # by a policy that declares that it drops
    REFUSED = "refused"  # no capacity, and the caller did not want best-effort


class Slo(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """The service level objective of one request. Any bound may be absent; the earliest deadline
    governs.

    `*_x` gives a bound as a multiple of its zero-load time; admission resolves it to seconds. A
    request whose SLO names `thinking_tbt_s` thinks first: that is its pace up to and including the
    end-of-thinking token, and `tbt_s` its pace after it. The stages of other requests are not
    followed, since nothing depends on them.
    """

    ttft_s: Positive | None = None
    tbt_s: Positive | None = None
    ttlt_s: Positive | None = None
    thinking_tbt_s: Positive | None = None
    ttft_x: Positive | None = None
    tbt_x: Positive | None = None
    ttlt_x: Positive | None = None

    @property
    def interactive(self) -> bool:
        """True for an SLO that bounds the first token and the pace, not the end (QoServe section
        3.2).
        """
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
        """The same SLO with every multiple turned into seconds; where a bound is given both ways,
        the tighter one governs.
        """

        def tighter(
            bound_s: float | None, multiple: float | None, zero_load_s: float
        ) -> float | None:
            bounds = [
                b
                for b in (bound_s, None if multiple is None else multiple * zero_load_s)
                if b is not None
            ]
            return min(bounds, default=None)

        return Slo(
            ttft_s=tighter(self.ttft_s, self.ttft_x, zero_load_ttft_s),
            tbt_s=tighter(self.tbt_s, self.tbt_x, zero_load_tbt_s),
            ttlt_s=tighter(self.ttlt_s, self.ttlt_x, zero_load_ttlt_s),
            thinking_tbt_s=self.thinking_tbt_s,
        )


class Measure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The timing of one request's tokens, folded over their emissions, across attempts.

    Deadlines are cumulative (QoServe Eq. 1-3): token n is due the pace of its stage after token n-1
    was *due*, so being early banks slack. Without a TTFT the pace is anchored at the first token
    itself.
    """

    tokens: int = 0
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    next_due_unix_s: float = math.inf  # deadline of the next token
    worst_tbt_s: float = 0.0
    late_tokens: int = 0  # tokens after their deadline
    # thinking tokens, the end-of-thinking token included; None: the request still thinks, if its
    # SLO names a pace for thinking
    thinking_tokens: int | None = None
    thought_unix_s: float = 0.0  # when the last thinking token was emitted

    @staticmethod
    def begin(slo: Slo, arrived_unix_s: float) -> "Measure":
        return Measure(next_due_unix_s=slo.first_due_unix_s(arrived_unix_s))

    def thinking(self, slo: Slo) -> bool:
        """True while the next token belongs to the thinking stage, as far as is known."""
        return slo.thinks and self.thinking_tokens is None

    def emit(
        self, n: int, at_unix_s: float, slo: Slo, thinking_tokens: int | None = None
    ) -> "Measure":
        """The measure after n more tokens reached the client together at `at_unix_s`.

        `thinking_tokens`: the thinking has ended, and exactly so many of all its tokens are
        thinking (0: it never thought); None: nothing new is known.
        """
        if n == 0:
            return self
        due, late = self.next_due_unix_s, self.late_tokens
        if thinking_tokens is None:
            thinking_tokens = self.thinking_tokens
        thinks_until: float = 0
        thinking_s = response_s = math.inf if slo.tbt_s is None else slo.tbt_s
        if slo.thinking_tbt_s is not None:
            thinks_until, thinking_s = (
                math.inf if thinking_tokens is None else thinking_tokens,
                slo.thinking_tbt_s,
            )
        for made in range(self.tokens + 1, self.tokens + n + 1):
            if made == 1 and due == math.inf:
                due = at_unix_s
            late += int(at_unix_s > due + 1e-9)
            due += thinking_s if made < thinks_until else response_s
        first = self.tokens == 0
        return Measure(
            tokens=self.tokens + n,
            first_unix_s=at_unix_s if first else self.first_unix_s,
            last_unix_s=at_unix_s,
            next_due_unix_s=due,
            worst_tbt_s=0.0 if first else max(self.worst_tbt_s, at_unix_s - self.last_unix_s),
            late_tokens=late,
            thinking_tokens=thinking_tokens,
            thought_unix_s=at_unix_s if self.tokens < thinks_until else self.thought_unix_s,
        )

    def met(self, slo: Slo, arrived_unix_s: float) -> bool:
        """True if every token met its deadline and the last one the TTLT (definition `deadline`,
        QoServe).
        """
        return (
            self.tokens > 0
            and self.late_tokens == 0
            and self.last_unix_s <= slo.last_due_unix_s(arrived_unix_s)
        )
