"""Scorers of routing: how well a replica suits a request, the higher the better. A scorer takes the
offer and returns a function of digests, so that the offer's part is computed once.
"""

import math
from collections.abc import Callable

from shared.schemas import Digest, Offer
from shared.vocabulary import ServiceClass

# Scores are rounded to these steps, so that replicas this close are equal and chance decides:
# several routers with the same digests must not all pick the same replica.
BACKLOG_STEP = 0.02  # of the time the request has
KV_STEP = 0.125  # of the capacity
DECODE = 0.25  # of a prefill's time is lost to each decode beside it
# Less free KV than this share counts as none: running decodes will want it.
KV_TIGHT = 0.05


Score = Callable[[Digest], float]


def free_slot(_offer: Offer) -> Score:
    """1 if the replica has a free slot."""
    return lambda digest: digest.free_slots > 0


def attainability(offer: Offer) -> Score:
    """1 if the replica's queue leaves time for the SLO, as predicted, or there is no SLO."""
    left_s = _left_s(offer)
    return lambda digest: digest.backlog_s - _found_s(digest) < left_s(digest)


def surplus(offer: Offer) -> Score:
    """1 if the replica would take best-effort work now; for a standard request always 1."""
    if offer.service_class is ServiceClass.STANDARD:
        return lambda _: 1
    return lambda digest: digest.surplus


def kv_room(_offer: Offer) -> Score:
    """1 if more KV is free than running decodes will want."""
    return lambda digest: _kv_free_share(digest) >= KV_TIGHT


def backlog(offer: Offer) -> Score:
    """Minus the backlog relative to the time that the request has for its first token (or its
    last), in steps. Where there is no such time, minus the backlog in seconds, in the same steps.
    """
    left_s = _left_s(offer)
    return lambda digest: _share(
        digest.backlog_s - _found_s(digest) + digest.hand_over_s, left_s(digest)
    )


def delay(offer: Offer) -> Score:
    """Like `backlog`, with the time that the request takes from all who are there: its prefill, as
    far as the replica does not have it, delays each that waits by as much, and each decode by
    DECODE of it, since decodes have tokens to spare. So affinity ends where it would cost more than
    it saves.
    """
    left_s, tokens = _left_s(offer), offer.prompt_tokens + offer.generated_tokens

    def delayed(digest: Digest) -> float:
        own_s = digest.token_s * (tokens - digest.cached_tokens)
        others = digest.waiting + DECODE * digest.running
        taken_s = own_s * (1 + others) + digest.hand_over_s
        return _share(digest.backlog_s + taken_s, left_s(digest))

    return delayed


def kv_free(_offer: Offer) -> Score:
    """Minus the share of the KV in use, in steps."""
    return lambda digest: -int((1 - _kv_free_share(digest)) / KV_STEP)


def _left_s(offer: Offer) -> Score:
    """The seconds until its next deadline."""
    due_unix_s, arrived_unix_s = _due_unix_s(offer), offer.arrived_unix_s
    return lambda digest: due_unix_s - max(digest.at_unix_s, arrived_unix_s)


def _share(backlog_s: float, left_s: float) -> float:
    share = backlog_s / left_s if 0 < left_s < math.inf else backlog_s
    return -round(min(share, 1e6) / BACKLOG_STEP)


def _kv_free_share(digest: Digest) -> float:
    return digest.kv_free_blocks / max(1, digest.kv_blocks)


def _found_s(digest: Digest) -> float:
    """The seconds that the replica saves of this prompt."""
    return digest.token_s * digest.cached_tokens


def _due_unix_s(offer: Offer) -> float:
    """The instant of the next deadline, or of the last if sooner; inf without an SLO to hold."""
    if offer.service_class is ServiceClass.BEST_EFFORT:
        return math.inf
    due_unix_s = offer.next_due_unix_s
    if offer.generated_tokens == 0:
        due_unix_s = min(due_unix_s, offer.slo.first_due_unix_s(offer.arrived_unix_s))
    return min(due_unix_s, offer.slo.last_due_unix_s(offer.arrived_unix_s))
