"""Prefill and decode apart: which replicas a request may go to by their roles, and where it goes on
once its prompt is computed. No threshold: an order of replicas counts the time for the KV to move
like any other time (`hand_over_s` in shared/routing/scorers.py), so a request stays together where
that is sooner.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shared.perf.iteration_time import CHUNK_TOKENS
from shared.routing.filters import able, accepting, of_model, of_tier
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, Role, ServiceClass


def begun(offer: Offer) -> bool:
    """True if the request has tokens: its prompt was computed somewhere."""
    return offer.generated_tokens > 0


def by_role(offer: Offer, digests: Sequence[Digest]) -> Sequence[Digest]:
    """Those of these replicas whose role suits the request, or all where none does. Those that only
    compute prompts know how long the KV takes to where the request would go on. Best-effort
    requests go where there is room.
    """
    if offer.service_class is ServiceClass.BEST_EFFORT or all(
        digest.role is Role.BOTH for digest in digests
    ):
        return digests
    if begun(offer):
        suited = [d for d in digests if d.role is not Role.PREFILL or d.replica == offer.kv_at]
        return suited or digests
    suited = []
    for digest in digests:
        if digest.role is Role.BOTH:
            suited.append(digest)
        elif digest.role is Role.PREFILL and (best := _best(offer, digest, digests)) is not None:
            suited.append(replace(digest, hand_over_s=_hand_over_s(offer, digest, best)))
    return suited or digests


def then(offer: Offer, first: Digest, digests: Mapping[ReplicaId, Digest]) -> Digest | None:
    """Where the request goes on once `first` has computed its prompt; None: it stays."""
    if begun(offer) or first.role is not Role.PREFILL:
        return None
    passes = accepting, of_model, of_tier, able
    eligible = [d for d in digests.values() if all(each(offer, d) for each in passes)]
    return _best(offer, first, eligible)


def preferred(offer: Offer, order: Sequence[ReplicaId]) -> Sequence[ReplicaId]:
    """The same order, but a request that was handed over goes first to where it was to go on, and
    last to where it came from.
    """
    if offer.then is None and offer.kv_at is None:
        return order
    return sorted(order, key=lambda each: (each != offer.then) + (each == offer.kv_at))


def _best(offer: Offer, first: Digest, digests: Sequence[Digest]) -> Digest | None:
    """The replica at which the second token comes soonest, of those with room for the request."""
    tokens = offer.prompt_tokens + offer.generated_tokens

    def second_s(digest: Digest) -> float:
        return _hand_over_s(offer, first, digest) + digest.decode_s

    roomy = [
        digest
        for digest in digests
        if digest.role is not Role.PREFILL
        and digest.replica != first.replica
        and digest.kv_move_s
        and digest.free_slots
        and digest.kv_free_blocks * digest.block_tokens > tokens
    ]
    return min(roomy, key=second_s, default=None)


def _hand_over_s(offer: Offer, first: Digest, second: Digest) -> float:
    """The seconds from the first token until the KV is there. It moves while the prompt is
    computed, and the last chunk after it.
    """
    tokens = offer.prompt_tokens + offer.generated_tokens
    move_s = second.kv_move_s * max(tokens - second.cached_tokens, 0)
    chunk_s = min(move_s, second.kv_move_s * CHUNK_TOKENS)
    return max(move_s - first.token_s * max(tokens - first.cached_tokens, 0), chunk_s)
