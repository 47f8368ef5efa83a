"""Filters: which of the replicas, all with fresh digests, a request may be offered to."""

from shared.features import meets
from shared.schemas import Digest, Offer


def accepting(_offer: Offer, digest: Digest) -> bool:
    """The replica is not draining."""
    return digest.accepting


def able(offer: Offer, digest: Digest) -> bool:
    """The replica has every feature and adapter that the request needs."""
    return meets(digest, offer.needs)


def never_declined(offer: Offer, _digest: Digest) -> bool:
    """No replica passes once one has declined the request: there is no second offer."""
    return not declined(offer)


def declined(offer: Offer) -> bool:
    """The request was offered before, and no replica has held it since it was last placed."""
    return offer.attempt > 0 and not offer.left
