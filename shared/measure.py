"""The timing of a request's tokens, kept as the few numbers that its verdict needs."""

import math

from msgspec import Struct

from shared.vocabulary import Count, Definition, Slo

WINDOW_TOKENS = 10  # SLOs-Serve section 6
# sums of deadlines are rounded: a token late by less is on time
CLOSE_S = 1e-9


class TpotWindows(Struct, frozen=True, array_like=True):
    """The means over each ten tokens of a stage, of which the worst counts (`max-tpot-10`). The
    windows of the response begin at the last thinking token, if there is one.
    """

    recent_unix_s: tuple[float, ...] = ()  # the last tokens of the present stage: a window's ends
    worst_s: float = 0.0  # per token, of the whole windows of the present stage
    thinking_worst_s: float = 0.0  # per token, of all of the thinking, once it is over

    def emit(self, number: int, at_unix_s: float, thinks_until: float) -> "TpotWindows":
        """The windows after token `number` (from 1), if thinking ends with token `thinks_until`."""
        recent, worst_s, thinking_worst_s = self.recent_unix_s, self.worst_s, self.thinking_worst_s
        begin = 1.0  # the token at which the windows of this stage begin
        if 0 < thinks_until < number:
            begin = thinks_until
            if number == thinks_until + 1:
                recent, worst_s, thinking_worst_s = recent[-1:], 0.0, self.present_s()
        recent = (*recent, at_unix_s)[-WINDOW_TOKENS - 1 :]
        if number > begin and (number - begin) % WINDOW_TOKENS == 0:
            worst_s = max(worst_s, _mean_s(recent))
        return TpotWindows(recent, worst_s, thinking_worst_s)

    def present_s(self) -> float:
        """The worst mean per token of this stage, with its last ten; 0 for a stage of one token."""
        return max(self.worst_s, _mean_s(self.recent_unix_s))


def _mean_s(at_unix_s: tuple[float, ...]) -> float:
    gaps = len(at_unix_s) - 1
    return (at_unix_s[-1] - at_unix_s[0]) / gaps if gaps > 0 else 0.0


class Measure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The timing of a request's tokens, folded over emissions and attempts. Deadlines are
    cumulative (QoServe Eq. 1-3): token n is due its stage's pace after token n-1 was *due*, so
    being early banks slack. Without a TTFT the pace begins at the first token.
    """

    tokens: Count = 0
    first_unix_s: float = 0.0
    last_unix_s: float = 0.0
    next_due_unix_s: float = math.inf  # deadline of the next token
    worst_tbt_s: float = 0.0
    late_tokens: Count = 0  # tokens after their deadline
    # thinking tokens; None while the request still thinks (and its SLO has a pace for thinking)
    thinking_tokens: Count | None = None
    thought_unix_s: float = 0.0  # when the last thinking token was emitted
    windows: TpotWindows | None = None  # None: the SLO's definition does not need them
    long_gaps: Count = 0  # between tokens, longer than the pace; counted where every gap is judged

    @staticmethod
    def begin(slo: Slo, arrived_unix_s: float) -> "Measure":
        return Measure(
            next_due_unix_s=slo.first_due_unix_s(arrived_unix_s),
            windows=TpotWindows() if slo.definition is Definition.MAX_TPOT_10 else None,
        )

    def thinking(self, slo: Slo) -> bool:
        """True while the next token belongs to the thinking stage, as far as is known."""
        return slo.thinks and self.thinking_tokens is None

    def thought(self, slo: Slo) -> int:
        """The number of thinking tokens; they count only if the SLO names a pace for thinking."""
        if not slo.thinks:
            return 0
        known = self.tokens if self.thinking_tokens is None else self.thinking_tokens
        return min(known, self.tokens)

    def emit(
        self, n: int, at_unix_s: float, slo: Slo, thinking_tokens: int | None = None
    ) -> "Measure":
        """The measure after n more tokens came at `at_unix_s`. `thinking_tokens`: thinking has
        ended after this many tokens (0: it never began); None: nothing new is known.
        """
        if n == 0:
            return self
        due, late = self.next_due_unix_s, self.late_tokens
        if thinking_tokens is None:
            thinking_tokens = self.thinking_tokens
        thinks_until: float = 0
        thinking_s = response_s = math.inf if slo.tbt_s is None else slo.tbt_s
        if slo.thinking_tbt_s is not None:
            thinks_until = math.inf if thinking_tokens is None else thinking_tokens
            thinking_s = slo.thinking_tbt_s
        windows, long_gaps = self.windows, self.long_gaps
        if self.tokens and slo.definition is Definition.EVERY_GAP:
            pace_s = thinking_s if self.tokens < thinks_until else response_s
            long_gaps += at_unix_s - self.last_unix_s > pace_s + CLOSE_S
        for made in range(self.tokens + 1, self.tokens + n + 1):
            if made == 1 and due == math.inf:
                due = at_unix_s
            late += int(at_unix_s > due + CLOSE_S)
            due += thinking_s if made < thinks_until else response_s
            if windows is not None:
                windows = windows.emit(made, at_unix_s, thinks_until)
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
            windows=windows,
            long_gaps=long_gaps,
        )

    def first_late(
        self, n: int, at_unix_s: float, slo: Slo, thinking_tokens: int | None = None
    ) -> tuple[int, float]:
        """The first late one of n more tokens, as in `emit`: its number, and when it was due.

        Raises: ValueError if none is.
        """
        before = self
        for _ in range(n):
            after = before.emit(1, at_unix_s, slo, thinking_tokens)
            if after.late_tokens > before.late_tokens:
                return after.tokens, before.next_due_unix_s
            before = after
        raise ValueError("none of these tokens is late")
