"""The routers of peers, from what they publish, over our digests: what is found of a prompt at each
replica, and who is there. Most are one score: the best first, chance among equals.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from random import Random

from shared.routing.pickers import BestFirst, Rotation
from shared.routing.pipeline import Pipeline, Router, Scorer
from shared.routing.routings import named
from shared.routing.scorers import Score, free_slot
from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId


def least_load(_offer: Offer) -> Score:
    """The fewest requests."""
    return lambda digest: -_there(digest)


def lmetric(offer: Offer) -> Score:
    """LMetric (OSDI 26): new prefill tokens, those that wait included, times the batch and one."""
    return lambda digest: -_waiting_tokens(offer, digest) * (_there(digest) + 1)


def llm_d(offer: Offer) -> Score:
    """llm-d's default weights: 3 for the part of the prompt that is found, 2 for a short queue, 2
    for free KV.
    """
    tokens = max(offer.prompt_tokens, 1)

    def score(digest: Digest) -> float:
        free = digest.kv_free_blocks / max(digest.kv_blocks, 1)
        return 3 * digest.cached_tokens / tokens + 2 / (1 + digest.waiting) + 2 * free

    return score


def headroom(offer: Offer) -> Score:
    """llm-d's latency routing: of those predicted to hold the TTFT, the one with least headroom
    (packing); else the least late.
    """

    def score(digest: Digest) -> float:
        due_s = offer.next_due_unix_s - max(digest.at_unix_s, offer.arrived_unix_s)
        left_s = due_s - digest.token_s * _waiting_tokens(offer, digest)
        return 1 / (1 + left_s) + 1 if left_s >= 0 else left_s

    return score


class Sticky:
    """Each session has a replica, by a hash of its name; who has none goes where fewest are."""

    def __init__(self) -> None:
        self._others = _by(least_load)

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        order = list(self._others(offer, digests, rng))
        if offer.session and order:
            own = sorted(order)[zlib.crc32(offer.session.encode()) % len(order)]
            order.remove(own)
            order.insert(0, own)
        return order


class CacheAware:
    """SGLang's rule: where loads differ by more than `apart` requests and `times`, the least load;
    else the longest match if it is above `threshold` of the prompt, and else the emptiest cache.
    """

    def __init__(self, apart: int = 32, times: float = 1.1, threshold: float = 0.5) -> None:
        self._apart, self._times, self._threshold = apart, times, threshold
        self._least, self._longest = _by(least_load), _by(_found)

    def __call__(
        self, offer: Offer, digests: Mapping[ReplicaId, Digest], rng: Random
    ) -> Sequence[ReplicaId]:
        loads = [_there(digest) for digest in digests.values()] or [0]
        uneven = max(loads) - min(loads) > self._apart and max(loads) > self._times * min(loads)
        found = max((digest.cached_tokens for digest in digests.values()), default=0)
        if uneven or found <= self._threshold * offer.prompt_tokens:
            return self._least(offer, digests, rng)
        return self._longest(offer, digests, rng)


def _by(scorer: Scorer) -> Pipeline:
    return Pipeline(BestFirst(), scorers=[free_slot, scorer])


def _found(_offer: Offer) -> Score:
    return lambda digest: digest.cached_tokens


def _there(digest: Digest) -> int:
    return digest.waiting + digest.running + digest.best_effort


def _waiting_tokens(offer: Offer, digest: Digest) -> int:
    return digest.waiting_prefill_tokens + offer.prompt_tokens - digest.cached_tokens


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "ours": lambda: named("in_time"),
    "round robin": lambda: Pipeline(Rotation()),
    "least load": lambda: _by(least_load),
    "sticky sessions": Sticky,
    "SGLang, cache-aware": CacheAware,
    "llm-d, weights": lambda: _by(llm_d),
    "llm-d, headroom": lambda: _by(headroom),
    "LMetric": lambda: _by(lmetric),
}
