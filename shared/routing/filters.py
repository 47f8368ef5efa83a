"""Filters of routing: each says if a request may be offered to a replica with a fresh digest."""

from shared.features import meets
from shared.schemas import Digest, Offer
from shared.vocabulary import ServiceClass


def accepting(_offer: Offer, digest: Digest) -> bool:
    """True if the replica is not draining."""
    return digest.accepting


def of_model(offer: Offer, digest: Digest) -> bool:
    """True if the replica is of the model that the request is for."""
    return offer.model in ("", digest.model)


def able(offer: Offer, digest: Digest) -> bool:
    """True if the replica has every feature and adapter that the request needs."""
    return meets(digest, offer.needs)


def of_tier(offer: Offer, digest: Digest) -> bool:
    """True if the replica serves the request's tier. A best-effort request may be of any."""
    best_effort = offer.service_class is ServiceClass.BEST_EFFORT
    return not digest.tiers or best_effort or offer.tier in digest.tiers


def never_declined(offer: Offer, _digest: Digest) -> bool:
    """False for all replicas once one has declined the request: there is no second offer."""
    return not declined(offer)


def declined(offer: Offer) -> bool:
    """True if the request was offered before, and has not been held since it was last placed."""
    return offer.attempt > 0 and not offer.left
