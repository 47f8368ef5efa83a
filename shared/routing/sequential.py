"""Which replica is asked: SLOs-Serve's sequential routing (section 4.2), and the plain dispatcher
that it is compared with.

A new request goes to the replicas in turn (section 6.2: "a one-shot round-robin dispatcher"). Where
it is declined the next replica in turn is asked, up to the hop limit of admission. `round_robin` is
the ablation of figure 14: who is declined once is best-effort at once.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Literal

from shared.routing.router import Router
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId

RouterName = Literal["sequential", "round_robin"]


class InTurn:
    """Each request that comes begins one replica further. Its counter is all it knows."""

    def __init__(self, *, hops: bool) -> None:
        self._hops = hops
        self._turn = 0

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        """All in the order in which they are to be asked; without hops nobody for a request that
        was declined.
        """
        ready = [replica for replica in sorted(digests) if digests[replica].accepting]
        declined = offer.attempt > 0 and not offer.left  # it was offered, and no replica has had it
        if not ready or (declined and not self._hops):
            return []
        first = self._turn % len(ready)
        if not declined:
            self._turn += 1
        return ready[first:] + ready[:first]


def make_router(name: RouterName) -> Router:
    return InTurn(hops=name == "sequential")
