"""The digest of a replica, which is all that routers know of it, from its request table."""

from collections.abc import Sequence

import numpy as np

from shared.core.replica.request_table import DECODE, RequestTable
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.request_timeline import Neighbour, merged
from shared.schemas import Announce, Digest, Offer

# the backlog is priced by the time a token takes in chunks of this size beside the present decodes
CHUNK_TOKENS = 512


def digest_of(
    facts: Announce,
    table: RequestTable,
    reserved: Sequence[Offer],
    profile: Profile,
    *,
    planner: str,
    now_unix_s: float,
) -> Digest:
    """The digest, but for free slots and surplus, which the core fills in. `reserved`: offers
    accepted and on the way to the worker.
    """
    n = table.live
    standard = ~table.best_effort[:n]
    decode = table.phase[:n] == DECODE
    left = np.where(decode, 0, table.target_tokens[:n] - table.computed_tokens[:n])
    waiting_tokens = int(left[standard].sum()) + sum(offer.prompt_tokens for offer in reserved)
    future = -(-int(left.sum()) // table.block_tokens)
    step = BatchShape(
        decodes=int(np.count_nonzero(decode)),
        decode_context=int(table.computed_tokens[:n][decode].sum()),
    )
    token_s = profile.batch_s(step.with_chunk(CHUNK_TOKENS, 0)) / CHUNK_TOKENS
    return Digest(
        replica=facts.replica,
        incarnation=facts.incarnation,
        planner=planner,
        at_unix_s=now_unix_s,
        model=facts.model,
        pool=facts.pool,
        waiting=int(np.count_nonzero(standard & ~decode)) + len(reserved),
        running=int(np.count_nonzero(standard & decode)),
        best_effort=n - int(np.count_nonzero(standard)),
        waiting_prefill_tokens=waiting_tokens,
        backlog_s=waiting_tokens * token_s,
        kv_blocks=table.kv_blocks,
        kv_free_blocks=max(table.kv_free_blocks() - future, 0),
        block_tokens=table.block_tokens,
        token_s=token_s,
        free_slots=0,
        surplus=False,
        accepting=not facts.draining,
        context_tokens=facts.context_tokens,
        features=facts.features,
        adapters=facts.adapters,
    )


def loads_of(
    table: RequestTable, reserved: Sequence[Offer], profile: Profile
) -> tuple[Neighbour, ...]:
    """Those whose standard prefills wait, `reserved` included, and the seconds that these take."""
    n = table.live
    rows = np.flatnonzero(~table.best_effort[:n] & (table.phase[:n] != DECODE))
    left = (table.target_tokens[rows] - table.computed_tokens[rows]).tolist()
    waiting = [table.offers[slot] for slot in table.slot[rows].tolist()]
    token_s = profile.batch_s(BatchShape().with_chunk(CHUNK_TOKENS, 0)) / CHUNK_TOKENS
    tokens = [*left, *(offer.prompt_tokens for offer in reserved)]
    return merged(
        Neighbour(offer.key.partition(".")[0], offer.tier, 1, its * token_s)
        for offer, its in zip([*waiting, *reserved], tokens, strict=True)
    )


def best_effort_waiting(table: RequestTable) -> int:
    """The number of best-effort requests whose prefill has not ended."""
    n = table.live
    return int(np.count_nonzero(table.best_effort[:n] & (table.phase[:n] != DECODE)))
