"""Requests that go on elsewhere with their KV. Those whose prompt is computed leave, if they are to
decode at another replica. The KV of those that come is fetched, if that is sooner than to compute
it again.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from shared.core.prefixes.kept import KeptPrefixes
from shared.core.replica.digest import decodes_of
from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import DECODE
from shared.perf.iteration_time import Profile, prefill_token_s
from shared.schemas import Announce, Offer


def handed_over(table: RequestTable) -> list[int]:
    """The slots whose prompts are computed and that are to go on elsewhere. Best-effort requests
    stay where they are.
    """
    if not table.bound:
        return []
    rows = [(slot, int(table.row_of[slot])) for slot in sorted(table.bound)]
    return [
        slot
        for slot, row in rows
        if row < table.live and table.phase[row] == DECODE and not table.best_effort[row]
    ]


class Fetching:
    """What a replica fetches. It begins anew with each resync (`synced`)."""

    def __init__(self, profile: Profile) -> None:
        self._profile, self._kept = profile, KeptPrefixes()
        self._facts: Announce | None = None
        self._table: RequestTable | None = None

    def synced(self, facts: Announce, kept: KeptPrefixes, table: RequestTable) -> None:
        self._facts, self._kept, self._table = facts, kept, table

    def heard(self, facts: Announce) -> None:
        self._facts = facts

    def wait_s(self, offer: Offer) -> float:
        """The longest that the KV of this offer may take to come: as long as to compute it takes.
        0: there is none to fetch, or it is computed sooner.
        """
        facts, table = self._facts, self._table
        if (
            facts is None
            or table is None
            or not facts.kv_move_s
            or offer.kv_at in (None, facts.replica)
        ):
            return 0.0
        [here] = self._kept.offered([offer])
        tokens = self._usable(offer) - here.cached_tokens
        computed_s = tokens * prefill_token_s(self._profile, decodes_of(table))
        return computed_s if 0.0 < tokens * facts.kv_move_s < computed_s else 0.0

    def seen(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """The offers with what is here of their prompts, or will have come when they begin."""
        return [
            replace(offer, cached_tokens=self._usable(offer)) if self.wait_s(offer) else offer
            for offer in self._kept.offered(offers)
        ]

    def _usable(self, offer: Offer) -> int:
        return self._kept.usable(offer.kv_tokens, offer.prompt_tokens + offer.generated_tokens)
