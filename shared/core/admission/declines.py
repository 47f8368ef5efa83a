"""Remembers, for admission, the kinds of requests that all replicas declined of late. Another of
the kind is refused without an offer, so most refusals under overload cost no write and no question.
"""

from collections import OrderedDict
from dataclasses import dataclass

from shared.core.relegation.pool import Lane, lane_of
from shared.schemas import Record
from shared.vocabulary import Slo

TRY_S = 0.5  # between two requests of a kind that are offered while all are declined
FORGET_S = 2.0  # after the last decline
KINDS_LIMIT = 1024

# importance and tenant, tier, SLO, model, needs
Kind = tuple[Lane, str, Slo, str, tuple[str, ...]]


@dataclass(slots=True)
class _Declined:
    """The shortest prompt and the shortest output that were declined, maybe of two requests."""

    prompt_tokens: int
    max_tokens: int
    declined_unix_s: float
    tried_unix_s: float
    credit: int = 0  # requests that may be tried at once


class Declines:
    """The kinds of requests that were declined of late. One request of such a kind is offered each
    TRY_S, and one more for each that was held, so few are offered in vain.
    """

    def __init__(self) -> None:
        self._declined: OrderedDict[Kind, _Declined] = OrderedDict()  # the latest last

    def tries(self, record: Record, now_unix_s: float) -> bool:
        """True if nothing as short or shorter was declined of late, or this one may try."""
        known = self._declined.get(_kind_of(record))
        if (
            known is None
            or now_unix_s - known.declined_unix_s > FORGET_S
            or record.prompt_tokens < known.prompt_tokens
            or record.max_tokens < known.max_tokens
        ):
            return True
        if known.credit:
            known.credit -= 1
            return True
        if now_unix_s - known.tried_unix_s < TRY_S:
            return False
        known.tried_unix_s = now_unix_s
        return True

    def held(self, record: Record) -> None:
        known = self._declined.get(_kind_of(record))
        if known is not None:
            known.credit += 1

    def declined(self, record: Record, now_unix_s: float) -> None:
        kind = _kind_of(record)
        prompt_tokens, max_tokens = record.prompt_tokens, record.max_tokens
        known = self._declined.pop(kind, None)
        if known is not None and now_unix_s - known.declined_unix_s <= FORGET_S:
            prompt_tokens = min(prompt_tokens, known.prompt_tokens)
            max_tokens = min(max_tokens, known.max_tokens)
        self._declined[kind] = _Declined(prompt_tokens, max_tokens, now_unix_s, now_unix_s)
        if len(self._declined) > KINDS_LIMIT:
            self._declined.popitem(last=False)


def _kind_of(record: Record) -> Kind:
    return lane_of(record), record.tier, record.slo, record.model, record.needs
