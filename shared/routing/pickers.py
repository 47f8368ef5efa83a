"""Sorts the replicas that passed a routing's filters into the order in which they are asked."""

from collections.abc import Callable, Sequence
from random import Random

from shared.routing.pipeline import Candidate, Picker
from shared.schemas import Offer


class BestFirst:
    """The highest scores first, compared score by score; chance among equals."""

    def __call__(
        self, offer: Offer, candidates: Sequence[Candidate], rng: Random
    ) -> Sequence[Candidate]:
        drawn = [(*candidate.scores, -rng.random()) for candidate in candidates]
        order = sorted(range(len(candidates)), key=drawn.__getitem__, reverse=True)
        return [candidates[i] for i in order]


class BestInTurn:
    """The highest scores first; among equals, each offer begins one replica further. Routers with
    the same digests begin at different replicas by chance.
    """

    def __init__(self) -> None:
        self._turn: int | None = None

    def __call__(
        self, offer: Offer, candidates: Sequence[Candidate], rng: Random
    ) -> Sequence[Candidate]:
        count = len(candidates)
        turn = rng.randrange(max(count, 1)) if self._turn is None else self._turn
        self._turn = turn + 1

        def key(i: int) -> tuple[tuple[float, ...], int]:
            return candidates[i].scores, (turn - i) % max(count, 1)

        return [candidates[i] for i in sorted(range(count), key=key, reverse=True)]


class Rotation:
    """Each offer that takes a turn begins one replica further (QoServe section 4.1.1); an offer
    that takes none begins where the next turn will.
    """

    def __init__(self, takes_turn: Callable[[Offer], bool] = lambda _offer: True) -> None:
        self._takes_turn = takes_turn
        self._turn = 0

    def __call__(
        self, offer: Offer, candidates: Sequence[Candidate], rng: Random
    ) -> Sequence[Candidate]:
        if not candidates:
            return []
        first = self._turn % len(candidates)
        self._turn += self._takes_turn(offer)
        return [*candidates[first:], *candidates[:first]]


class TicketOrder:
    """Two pools, each in an order of its own (Ascendra sections 4 and 6.1); `high` serves requests
    about to be late.

    An offloaded request asks the high pool, then the other. Other requests ask the first of the
    high pool with a ticket out (nothing waits there), then the other pool, then the rest: a second
    ticket would use up the hops.
    """

    def __init__(self, high: str, in_high: Picker, in_low: Picker) -> None:
        self._high = high
        self._in_high, self._in_low = in_high, in_low

    def __call__(
        self, offer: Offer, candidates: Sequence[Candidate], rng: Random
    ) -> Sequence[Candidate]:
        high_pool = [c for c in candidates if c.digest.pool == self._high]
        low_pool = [c for c in candidates if c.digest.pool != self._high]
        high, low = self._in_high(offer, high_pool, rng), self._in_low(offer, low_pool, rng)
        if offer.left == "offloaded":
            return [*high, *low]
        ticket = [candidate for candidate in high if candidate.digest.waiting == 0][:1]
        return [*ticket, *low, *(candidate for candidate in high if candidate not in ticket)]
