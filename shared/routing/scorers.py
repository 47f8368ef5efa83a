"""Scorers: how well one replica suits a request. The higher, the better; equal scores leave the
order to the next scorer.
"""

import math

from shared.schemas import Digest, Offer
from shared.vocabulary import ServiceClass

# Scores are rounded to these steps, so that replicas this close are alike and chance decides:
# several routers with the same digests must not all pick the same replica.
BACKLOG_STEP = 0.02  # of the time the request has
KV_STEP = 0.125  # of the capacity
# Less free KV than this share is no room: running decodes will want it.
KV_TIGHT = 0.05


def free_slot(_offer: Offer, digest: Digest) -> float:
    """1 if the replica has a free slot."""
    return digest.free_slots > 0


def attainability(offer: Offer, digest: Digest) -> float:
    """1 if the queue of the replica is predicted to leave time for the SLO. A best-effort request
    has none to hold: 1 everywhere.
    """
    return _backlog_s(digest) < _left_s(offer, digest.at_unix_s)


def surplus(offer: Offer, digest: Digest) -> float:
    """1 if the replica would take best-effort work now. For a standard request 1 everywhere."""
    return offer.service_class is ServiceClass.STANDARD or digest.surplus


def kv_room(_offer: Offer, digest: Digest) -> float:
    """1 if more KV is free than running decodes will want."""
    return _kv_free(digest) >= KV_TIGHT


def backlog(offer: Offer, digest: Digest) -> float:
    """Minus the backlog relative to the time that the request has for its first token (or its
    last), in steps. Where there is no such time, minus the backlog in seconds, in the same steps.
    """
    left_s = _left_s(offer, digest.at_unix_s)
    backlog_s = _backlog_s(digest)
    relative = backlog_s / left_s if 0 < left_s < math.inf else backlog_s
    return -round(min(relative, 1e6) / BACKLOG_STEP)


def kv_free(_offer: Offer, digest: Digest) -> float:
    """Minus the share of the KV in use, in steps."""
    return -int((1 - _kv_free(digest)) / KV_STEP)


def _backlog_s(digest: Digest) -> float:
    return max(0.0, digest.backlog_s)


def _kv_free(digest: Digest) -> float:
    return digest.kv_free_blocks / max(1, digest.kv_blocks)


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
