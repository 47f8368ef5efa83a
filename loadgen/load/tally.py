"""The outcome of each request of a run, as its client saw it."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from loadgen.load.mix import PlannedRequest
from shared.core.record.judgement import missed
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import PeerError
from shared.measure import Measure
from shared.rules.tiers import TierSet
from shared.vocabulary import FinishReason, Slo

# The error codes of a server that has no room, as against a request that is impossible.
NO_ROOM = {"slow_down", "resource_unavailable", "server_is_overloaded", "rate_limit_exceeded"}

# The codes by which a server refuses every request of the kind, and what to change.
MISTAKEN = {
    "unknown_tier": "--tiers says which tiers the load has",
    "invalid_api_key": "SLACKLINE_API_KEY is the key of the load",
}

# the SLO of a planned request in seconds
Resolve = Callable[[Slo, PlannedRequest], Slo]


class Outcome:
    """One request, from its sending on. Mutable: senders write to it as events arrive."""

    __slots__ = (
        "cached_tokens", "ended", "gaps_s", "lateness_s", "measure", "message", "planned",
        "relegated", "sent_unix_s", "server_met", "slo", "task_unix_s",
    )  # fmt: skip

    def __init__(
        self,
        planned: PlannedRequest,
        slo: Slo,
        sent_unix_s: float,
        lateness_s: float,
        gaps_s: "array[float]",
        task_unix_s: float,
    ) -> None:
        self.planned = planned
        self.slo = slo
        self.sent_unix_s = sent_unix_s
        self.task_unix_s = task_unix_s  # when the first round of its session was sent
        self.lateness_s = lateness_s  # from its planned instant to its sending
        self.measure = Measure.begin(slo, sent_unix_s)
        # of all requests of the tier; the gap between tokens that arrive together is 0
        self.gaps_s = gaps_s
        # empty while it runs; then a FinishReason, `error`, or `unfinished` at the end of the run
        self.ended = ""
        self.server_met: bool | None = None  # the server's own verdict
        self.relegated = False
        # of its prompt, found in a prefix cache; None: the server does not say
        self.cached_tokens: int | None = None
        self.message = ""

    def emit(self, n: int, at_unix_s: float) -> None:
        if n <= 0:
            return
        before = self.measure
        self.measure = before.emit(n, at_unix_s, self.slo, self.planned.thinking_tokens)
        if before.tokens:
            self.gaps_s.append(at_unix_s - before.last_unix_s)
        for _ in range(n - 1):
            self.gaps_s.append(0.0)

    def end(self, ended: str, message: str = "") -> None:
        """Note how the request ended. Only the first end counts."""
        if not self.ended:
            self.ended, self.message = ended, message

    def refuse(self, code: str, message: str) -> None:
        """Note a refusal. Raises PeerError if every later request would be refused likewise."""
        if code in MISTAKEN:
            raise PeerError(f"{message}; {MISTAKEN[code]}", code=code)
        self.end(FinishReason.REFUSED if code in NO_ROOM else "error", f"{code}: {message}")

    @property
    def finished(self) -> bool:
        return self.ended in GOOD_ENDS

    @property
    def met(self) -> bool:
        """True if the SLO is met by its own definition, at the client, counted from the sending."""
        slo = self.slo
        if slo.task_ttlt_s is not None:
            left_s = self.task_unix_s + slo.task_ttlt_s - self.sent_unix_s
            slo = replace(slo, ttlt_s=left_s if slo.ttlt_s is None else min(slo.ttlt_s, left_s))
        return self.finished and not missed(self.measure, slo, self.sent_unix_s)

    @property
    def ttft_s(self) -> float | None:
        return self.measure.first_unix_s - self.sent_unix_s if self.measure.tokens else None

    @property
    def ttlt_s(self) -> float | None:
        return (
            self.measure.last_unix_s - self.sent_unix_s
            if self.finished and self.measure.tokens
            else None
        )


@dataclass(slots=True)
class Tally:
    """The outcomes of all requests of a run."""

    tiers: TierSet
    resolve: Resolve = lambda slo, _: slo
    outcomes: list[Outcome] = field(default_factory=list)
    gaps_s: Mapping[str, "array[float]"] = field(init=False)
    began_unix_s: dict[str, float] = field(default_factory=dict)  # of each session

    def __post_init__(self) -> None:
        self.gaps_s = {name: array("f") for name in self.tiers.tiers}

    def begin(self, planned: PlannedRequest, sent_unix_s: float, lateness_s: float) -> Outcome:
        slo = self.resolve(self.tiers.tiers[planned.tier].slo, planned)
        task_unix_s = sent_unix_s
        if planned.session:
            task_unix_s = self.began_unix_s.setdefault(planned.session, sent_unix_s)
        gaps_s = self.gaps_s[planned.tier]
        outcome = Outcome(planned, slo, sent_unix_s, lateness_s, gaps_s, task_unix_s)
        self.outcomes.append(outcome)
        return outcome
