"""Keeps the life of one request for the console: its steps and tokens, as messages tell them."""

import math
from array import array

from shared.console.picture import LifeEvent, LifePicture, RequestRow
from shared.schemas import Held, RosterEntry, Verdict
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

KEPT = 512  # chunks, and emissions, that are kept: about two minutes of a chat
EVENTS = 64


class Steps:
    """Instants, each with a number of tokens; the newest KEPT or more."""

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, at_unix_s: float, tokens: int) -> None:
        self._values.append(at_unix_s)
        self._values.append(tokens)
        if len(self._values) > 4 * KEPT:
            del self._values[: 2 * KEPT]

    def after(self, begin_unix_s: float) -> list[tuple[float, int]]:
        values = self._values
        return [(values[i] - begin_unix_s, int(values[i + 1])) for i in range(0, len(values), 2)]


class Life:
    """One request. Until its planner is asked only key and place are known: `slo` is None."""

    def __init__(self, key: RequestKey, now_unix_s: float) -> None:
        self.key = key
        self.tier = ""
        self.slo: Slo | None = None
        self.arrived_unix_s = now_unix_s  # until the arrival is known
        self.prompt_tokens = self.max_tokens = 0
        self.best_effort = False
        self.replica = ReplicaId("")
        self.attempt = 0
        self.computed = self.generated = 0
        self.thinking = False
        self.next_due_unix_s = math.inf
        self.heard_unix_s = now_unix_s
        self.newest_unix_s = math.nan  # when its newest token was emitted
        self.whole = False
        self.chunks, self.tokens = Steps(), Steps()
        self._events: list[tuple[float, str]] = []
        self.verdict: Verdict | None = None

    def event(self, at_unix_s: float, what: str) -> None:
        if len(self._events) < EVENTS:
            self._events.append((at_unix_s, what))

    def hold(self, held: Held, replica: ReplicaId, at_unix_s: float) -> None:
        """An attempt begins on a replica."""
        self.whole = self.whole or held.offset == 0  # earlier attempts made no tokens
        self.replica, self.attempt = replica, held.attempt
        self.computed, self.generated = 0, held.offset
        self.event(at_unix_s, f"held by {replica}, attempt {held.attempt}")

    def name(self, entry: RosterEntry) -> None:
        """Take what its planner says of the request, but for its progress: acks were newer."""
        known = self.tier
        self.tier, self.slo = entry.tier, entry.slo
        self.arrived_unix_s = entry.arrived_unix_s
        self.prompt_tokens, self.max_tokens = entry.prompt_tokens, entry.max_tokens
        self.best_effort = entry.service_class is ServiceClass.BEST_EFFORT
        if known:
            return
        self.thinking = entry.thinking
        if self.whole:
            slo, pace_s = entry.slo, self._pace_s()
            self.next_due_unix_s = slo.first_due_unix_s(entry.arrived_unix_s)
            if self.generated and math.isfinite(pace_s):
                begin = self.next_due_unix_s
                begin = self.newest_unix_s if begin == math.inf else begin
                self.next_due_unix_s = begin + pace_s * self.generated
            elif self.generated:
                self.next_due_unix_s = math.inf
        else:
            self.next_due_unix_s = entry.next_due_unix_s
            self.computed, self.generated = entry.computed_tokens, entry.generated_tokens

    def emit(self, tokens: int, at_unix_s: float) -> float | None:
        """The request made tokens. Returns the time since the last ones; None for the first."""
        gap_s = at_unix_s - self.newest_unix_s
        self.newest_unix_s = at_unix_s
        self.generated += tokens
        self.tokens.add(at_unix_s, tokens)
        pace_s = self._pace_s()
        if self.next_due_unix_s == math.inf:
            self.next_due_unix_s = at_unix_s
        self.next_due_unix_s += pace_s * tokens
        return None if math.isnan(gap_s) else gap_s

    def _pace_s(self) -> float:
        return math.inf if self.slo is None else self.slo.pace_s(self.thinking)

    @property
    def phase(self) -> str:
        if self.generated and self.computed >= self.prompt_tokens:
            return "decode"
        return "prefill" if self.computed else "waiting"

    def slack_s(self, now_unix_s: float) -> float:
        """Time to the deadline of the next token; inf where none is due, or it is best-effort."""
        if self.slo is None or self.best_effort:
            return math.inf
        return min(self.next_due_unix_s, self.slo.last_due_unix_s(self.arrived_unix_s)) - now_unix_s

    def row(self, now_unix_s: float) -> RequestRow:
        return RequestRow(
            self.key,
            self.tier,
            self.replica,
            self.phase,
            self.best_effort,
            now_unix_s - self.arrived_unix_s,
            self.prompt_tokens,
            min(self.computed, self.prompt_tokens),
            self.generated,
            self.max_tokens,
            finite(self.slack_s(now_unix_s)),
        )

    def picture(self, now_unix_s: float) -> LifePicture:
        begin, verdict = self.arrived_unix_s, self.verdict
        return LifePicture(
            key=self.key,
            tier=self.tier,
            slo=self.slo,
            best_effort=self.best_effort,
            replica=self.replica,
            arrived_unix_s=begin,
            at_s=(verdict.ended_unix_s if verdict else now_unix_s) - begin,
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            computed_tokens=self.computed,
            generated_tokens=verdict.output_tokens if verdict else self.generated,
            slack_s=None if verdict else finite(self.slack_s(now_unix_s)),
            whole=self.whole,
            events=[LifeEvent(at - begin, what) for at, what in self._events],
            chunks=self.chunks.after(begin),
            tokens=self.tokens.after(begin),
            ended=verdict.finish_reason if verdict else "",
            slo_met=verdict.slo_met if verdict else None,
            missed=verdict.missed if verdict else "",
            ttft_s=verdict.ttft_s if verdict else None,
            worst_tbt_s=verdict.worst_tbt_s if verdict else None,
            ttlt_s=verdict.ttlt_s if verdict else None,
        )


def finite(value_s: float) -> float | None:
    return value_s if math.isfinite(value_s) else None
