"""A replica as others see it, made from its request table: the digest, which is all that routers
know of a replica, the list of held requests, and the numbers that its planner exports.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared.columns import unpack
from shared.core.replica.in_flight import InFlightPlan
from shared.core.replica.learning import Learning
from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import DECODE, WAITING
from shared.perf.iteration_time import Profile, prefill_token_s
from shared.perf.shape import BatchShape
from shared.request_timeline import Neighbour, merged
from shared.schemas import Announce, Digest, Offer, PlanAck, RosterEntry
from shared.vocabulary import Role, ServiceClass


def digest_of(
    facts: Announce,
    table: RequestTable,
    reserved: Sequence[Offer],
    profile: Profile,
    *,
    planner: str,
    now_unix_s: float,
    free_slots: int,
    best_effort_waiting: int,
    prefixes: tuple[int, bytes, bytes],
    role: Role,
) -> Digest:
    """The digest. `reserved`: offers accepted and on the way to the worker. Surplus is reported
    while fewer than `best_effort_waiting` best-effort requests wait for their prefill. `role`: what
    it serves now.
    """
    n = table.live
    standard = ~table.best_effort[:n]
    decode = table.phase[:n] == DECODE
    left = np.where(decode, 0, table.target_tokens[:n] - table.computed_tokens[:n])
    new = sum(offer.prompt_tokens - offer.cached_tokens for offer in reserved)
    waiting_tokens = int(left[standard].sum()) + new
    load_s = float(table.load_s[:n][standard].sum()) + sum(offer.load_s for offer in reserved)
    unheld = int(left.sum())
    if table.expects:  # what will be found takes KV, too
        unheld += int(table.computed_tokens[:n][table.phase[:n] == WAITING].sum())
    future = -(-unheld // table.block_tokens)
    step = decodes_of(table)
    token_s = prefill_token_s(profile, step)
    waiting = int(np.count_nonzero(standard & ~decode)) + len(reserved)
    roomy = table.kv_free_blocks() * 4 > table.kv_blocks
    few = int(np.count_nonzero(~standard & ~decode)) < best_effort_waiting
    return Digest(
        replica=facts.replica,
        incarnation=facts.incarnation,
        planner=planner,
        at_unix_s=now_unix_s,
        model=facts.model,
        pool=facts.pool,
        waiting=waiting,
        running=int(np.count_nonzero(standard & decode)),
        best_effort=n - int(np.count_nonzero(standard)),
        waiting_prefill_tokens=waiting_tokens,
        backlog_s=waiting_tokens * token_s + load_s,
        kv_blocks=table.kv_blocks,
        kv_free_blocks=max(table.kv_free_blocks() - future, 0),
        block_tokens=table.block_tokens,
        token_s=token_s,
        free_slots=free_slots,
        surplus=waiting == 0 and few and roomy,
        accepting=not facts.draining,
        context_tokens=facts.context_tokens,
        features=facts.features,
        adapters=facts.adapters,
        tiers=facts.tiers,
        prefix_seq=prefixes[0],
        prefixes_kept=prefixes[1],
        prefixes_dropped=prefixes[2],
        role=role,
        decode_s=profile.batch_s(step.with_decodes(1, 0)),
        kv_address=facts.kv_address,
        kv_move_s=facts.kv_move_s,
    )


def decodes_of(table: RequestTable) -> BatchShape:
    """The decodes of the present, as a batch."""
    decode = table.phase[: table.live] == DECODE
    return BatchShape(
        decodes=int(np.count_nonzero(decode)),
        decode_context=int(table.computed_tokens[: table.live][decode].sum()),
    )


def loads_of(
    table: RequestTable, reserved: Sequence[Offer], profile: Profile
) -> tuple[Neighbour, ...]:
    """The standard prefills that wait, `reserved` included: whose they are, and their seconds."""
    n = table.live
    rows = np.flatnonzero(~table.best_effort[:n] & (table.phase[:n] != DECODE))
    left = (table.target_tokens[rows] - table.computed_tokens[rows]).tolist()
    waiting = [table.offers[slot] for slot in table.slot[rows].tolist()]
    token_s = prefill_token_s(profile, BatchShape())
    tokens = [*left, *(offer.prompt_tokens - offer.cached_tokens for offer in reserved)]
    return merged(
        Neighbour(offer.key.partition(".")[0], offer.tier, 1, its * token_s)
        for offer, its in zip([*waiting, *reserved], tokens, strict=True)
    )


def roster(table: RequestTable, slots: Iterable[int]) -> list[RosterEntry]:
    """The entries of these slots, or of all where none is named; an empty slot has none."""
    wanted = list(slots) or list(table.offers)
    return [_entry(table, slot) for slot in wanted if slot in table.offers]


def _entry(table: RequestTable, slot: int) -> RosterEntry:
    offer, row = table.offers[slot], table.row_of[slot]
    return RosterEntry(
        slot=slot,
        key=offer.key,
        attempt=offer.attempt,
        service_class=ServiceClass.BEST_EFFORT if table.best_effort[row] else ServiceClass.STANDARD,
        tier=offer.tier,
        slo=offer.slo,
        arrived_unix_s=offer.arrived_unix_s,
        prompt_tokens=offer.prompt_tokens,
        max_tokens=offer.max_tokens,
        computed_tokens=int(table.computed_tokens[row]),
        generated_tokens=int(table.generated_tokens[row]),
        next_due_unix_s=float(table.next_due_unix_s[row]),
        thinking=bool(table.thinking[row]),
    )


@dataclass(slots=True)
class Counters:
    """Counts that the planner exports, or the simulator reads."""

    plans: int = 0
    acks: int = 0
    resyncs: int = 0
    mispredicted_entries: int = 0
    forced_preemptions: int = 0
    # of prompts that began: tokens expected in the prefix cache, and those that were found there
    expected_tokens: int = 0
    found_tokens: int = 0

    def cached(self, flight: InFlightPlan, ack: PlanAck) -> None:
        if flight.expected is not None:
            self.expected_tokens += int(flight.expected.sum())
        if ack.cached:
            self.found_tokens += int(unpack(ack.cached).sum())


class Figures(NamedTuple):
    """The numbers of a replica that its planner exports."""

    residual: float  # the corrected profile's relative error, smoothed
    bias: float  # (measured - predicted) / measured of late iterations taken together
    # measured / base profile as now used, for decode-only, mixed and prefill-only iterations
    gammas: tuple[float, float, float]
    lead_s: float  # between the next plan's leaving and the predicted end of the running one
    best_effort: int  # requests held
    # of each standard request with a deadline: the deadline of its next unplanned token, minus now
    slacks_s: list[float]


def figures_of(table: RequestTable, learned: Learning, now_unix_s: float) -> Figures:
    best_effort, due = table.best_effort[: table.live], table.next_due_unix_s[: table.live]
    profile = learned.profile
    return Figures(
        profile.residual,
        profile.bias,
        profile.gammas,
        learned.lead.seconds,
        int(np.count_nonzero(best_effort)),
        (due[~best_effort & np.isfinite(due)] - now_unix_s).tolist(),
    )
