"""In which order replicas are asked. Digests carry what the caller itself offered recently
(shared/policy/seam.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, ServiceClass

Router = Callable[[Offer, Mapping[ReplicaId, Digest], Random], Sequence[ReplicaId]]
RouterName = Literal["attainable", "round_robin"]

# Replicas this close are alike, and chance decides: several routers with the same digests must not
# all pick the same one.
BACKLOG_STEP = 0.02  # of the time the request has
KV_STEP = 0.125  # of the capacity
# Less free KV than this share is no room: running decodes will want it.
KV_TIGHT = 0.05


def attainable(
    offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
) -> Sequence[ReplicaId]:
    """Those with a free slot first, then those predicted to hold the SLO, then those with KV room;
    among them the least backlog relative to the time the request has for its first token (or its
    last), the least KV in use, and chance.

    A best-effort request has no time to hold; it goes by surplus and backlog in seconds.
    """

    def key(digest: Digest) -> tuple[bool, bool, bool, int, int, float]:
        left_s = _left_s(offer, digest.at_unix_s)
        backlog_s = max(0.0, digest.backlog_s)
        hopeless = (
            backlog_s >= left_s
            if offer.service_class is ServiceClass.STANDARD
            else not digest.surplus
        )
        relative = backlog_s / left_s if 0 < left_s < math.inf else backlog_s
        free = digest.kv_free_blocks / max(1, digest.kv_blocks)
        return (
            digest.free_slots <= 0,
            hopeless,
            free < KV_TIGHT,
            round(min(relative, 1e6) / BACKLOG_STEP),
            int((1 - free) / KV_STEP),
            rng.random(),
        )

    keys = {
        replica: key(digests[replica]) for replica in sorted(digests) if digests[replica].accepting
    }
    return sorted(keys, key=keys.__getitem__)


def _left_s(offer: Offer, now_unix_s: float) -> float:
    """Seconds until the next token is due, or the last if that is sooner; inf without an SLO to
    hold.
    """
    if offer.service_class is ServiceClass.BEST_EFFORT:
        return math.inf
    due = offer.next_due_unix_s
    if offer.generated_tokens == 0:
        due = min(due, offer.slo.first_due_unix_s(offer.arrived_unix_s))
    return min(due, offer.slo.last_due_unix_s(offer.arrived_unix_s)) - max(
        now_unix_s, offer.arrived_unix_s
    )


class RoundRobin:
    """Each call begins one replica further (QoServe section 4.1.1). Its counter is all it knows."""

    def __init__(self) -> None:
        self._turn = 0

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        ready = [replica for replica in sorted(digests) if digests[replica].accepting]
        if not ready:
            return []
        first = self._turn % len(ready)
        self._turn += 1
        return ready[first:] + ready[:first]


def make_router(name: RouterName) -> Router:
    return RoundRobin() if name == "round_robin" else attainable
