"""Routing: the order in which replicas are asked to hold a request, best first. *Filters* say which
replicas may be asked at all, *scorers* give each a tuple of scores, of which later ones break ties,
and a *picker* sorts them. A further concern becomes a further scorer.

Digests count the caller's own recent placements (shared/core/load_view.py). Named routings:
shared/routing/routings.py.
"""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from shared.routing.apart import by_role, preferred
from shared.routing.filters import able, accepting, of_model, of_tier
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId


class Router(Protocol):
    """The order of replicas to ask. Each admission has its own: a picker may keep a turn."""

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        """The replicas to offer to, best first."""


class Candidate(NamedTuple):
    """A replica that passed the filters."""

    digest: Digest
    scores: tuple[float, ...]  # parallel to the scorers


Filter = Callable[[Offer, Digest], bool]  # True: the replica may be asked
# Called with the offer, then with each digest. A higher score is better.
Scorer = Callable[[Offer], Callable[[Digest], float]]
# The candidates in the order in which they are to be asked. They come sorted by replica id.
Picker = Callable[[Offer, Sequence[Candidate], Random], Sequence[Candidate]]

# Every pipeline begins with these filters.
ELIGIBLE: tuple[Filter, ...] = (accepting, of_model, of_tier, able)


class Pipeline:
    """Filter, score, pick."""

    def __init__(
        self, picker: Picker, *, filters: Sequence[Filter] = (), scorers: Sequence[Scorer] = ()
    ) -> None:
        self._filters = (*ELIGIBLE, *filters)
        self._scorers = tuple(scorers)
        self._picker = picker

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        passed: Sequence[Digest] = [digests[replica] for replica in sorted(digests)]
        for passes in self._filters:
            passed = [digest for digest in passed if passes(offer, digest)]
        passed = by_role(offer, passed)
        scores = [scorer(offer) for scorer in self._scorers]
        candidates = [
            Candidate(digest, tuple([score(digest) for score in scores])) for digest in passed
        ]
        picked = self._picker(offer, candidates, rng)
        return preferred(offer, [candidate.digest.replica for candidate in picked])
