"""Sums the work that comes to one admission, by tier, for the forecast of replicas needed."""

from collections.abc import Callable
from dataclasses import dataclass

from shared.schemas import Record, TierArrivals, WorkArrived
from shared.vocabulary import Definition

TIERS_LIMIT = 64  # tiers in one message; the work of further ones counts for `OTHER`
OTHER = "other"
EARNS = (Definition.DEADLINE, Definition.TTLT)  # by these, early tokens earn slack


@dataclass(slots=True)
class _Sums:
    requests: int = 0
    prompt_tokens: int = 0
    prompt_squares: float = 0.0
    due_s: float = 0.0
    paces: float = 0.0
    whole: int = 0
    spare_s: float = 0.0

    def add(self, record: Record) -> None:
        slo = record.slo
        pace_s = slo.tightest_pace_s(thinking=slo.thinks)
        bounds_s = [bound_s for bound_s in (slo.ttft_s, slo.ttlt_s) if bound_s is not None]
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.prompt_squares += record.prompt_tokens**2
        self.due_s += min(bounds_s, default=record.expires_unix_s - record.arrived_unix_s)
        self.paces += 1.0 / pace_s
        self.whole += slo.ttft_s is None and slo.ttlt_s is not None
        if slo.ttft_s is not None and slo.definition in EARNS:
            self.spare_s += slo.ttft_s


class ArrivalTally:
    """The requests since the last message, one set of sums for each tier of each model."""

    def __init__(self, model_of: Callable[[Record], str]) -> None:
        self._model_of = model_of
        self._sums: dict[str, dict[str, _Sums]] = {}

    def add(self, record: Record) -> None:
        tiers = self._sums.setdefault(self._model_of(record), {})
        name = record.tier if record.tier in tiers or len(tiers) < TIERS_LIMIT else OTHER
        tiers.setdefault(name, _Sums()).add(record)

    def take(self) -> list[WorkArrived]:
        """A message for each model of which anything came; the next ones begin at nothing."""
        sums, self._sums = self._sums, {}
        return [
            WorkArrived(
                model=model,
                tiers=[
                    TierArrivals(
                        tier,
                        each.requests,
                        each.prompt_tokens,
                        each.prompt_squares,
                        each.due_s,
                        each.paces,
                        each.whole,
                        each.spare_s,
                    )
                    for tier, each in tiers.items()
                ],
            )
            for model, tiers in sums.items()
        ]
