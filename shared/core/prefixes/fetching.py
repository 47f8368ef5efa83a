"""KV that comes from another replica: it is fetched where that is sooner than to compute it."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from shared.core.prefixes.kept import KeptPrefixes
from shared.perf.iteration_time import Profile, prefill_token_s
from shared.perf.shape import BatchShape
from shared.schemas import Announce, Offer


def fetch_most_s(kv_tokens: int) -> float:
    """The longest that a worker waits for so much KV, and so an admission for its answer."""
    return min(1.0 + 1e-4 * kv_tokens, 10.0) if kv_tokens else 0.0


class Fetching:
    """The KV that a replica fetches: which, and how long it waits."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._kept = profile, KeptPrefixes()
        self._facts: Announce | None = None
        self._step: Callable[[], BatchShape] = BatchShape

    def synced(self, facts: Announce, kept: KeptPrefixes, step: Callable[[], BatchShape]) -> None:
        """`step` returns the decodes of the present."""
        self._facts, self._kept, self._step = facts, kept, step

    def heard(self, facts: Announce) -> None:
        self._facts = facts

    def wait_s(self, offer: Offer) -> float:
        """The longest that the KV of this offer may take to come: as long as to compute it takes.
        0: there is none to fetch, or it is computed sooner.
        """
        facts = self._facts
        if facts is None or not facts.kv_move_s or offer.kv_at in (None, facts.replica):
            return 0.0
        [here] = self._kept.offered([offer])
        tokens = self._usable(offer) - here.cached_tokens
        computed_s = tokens * prefill_token_s(self._profile, self._step())
        wait_s = min(computed_s, fetch_most_s(offer.kv_tokens))
        return wait_s if 0.0 < tokens * facts.kv_move_s < wait_s else 0.0

    def seen(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """The offers with what is here of their prompts, or will have come when they begin."""
        return [
            replace(offer, cached_tokens=self._usable(offer)) if self.wait_s(offer) else offer
            for offer in self._kept.offered(offers)
        ]

    def _usable(self, offer: Offer) -> int:
        return self._kept.usable(offer.kv_tokens, offer.prompt_tokens + offer.generated_tokens)
