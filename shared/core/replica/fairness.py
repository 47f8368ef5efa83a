"""Fair shares of a replica between tenants. Where requests of equal importance compete, those of a
tenant that has been given more than others count a little less.

Each request has a turn: a number of tokens, divided by the weight of its tenant. It follows the
tokens of that tenant's earlier requests. It is at most CREDIT_TOKENS before the first turn of the
prefills that wait, so a tenant that was away has no more credit than that. A policy sees the
importance of a request lowered by a millionth for each QUANTUM_TOKENS between that first turn and
its own. It is lowered only while requests of two tenants compete. A single tenant is served as if
there were no tenants, and tokens that no other tenant wants go to the tenant that asks for them.

The last free slots are left to tenants that hold less than their share of the replica's slots.

Source: start-time fair queueing, whose start tags are the turns, P. Goyal et al., SIGCOMM 1996; for
tokens of a language model Y. Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
Deviations: within a tenant, and within a quantum, the policy says who gives way; the credit lets a
tenant below its share send its requests in bursts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from shared.columns import Indices
from shared.core.replica.request_table import RequestTable
from shared.core.replica.slots import Attempt, attempt_of
from shared.core.replica.table_rows import DECODE
from shared.policy.seam import Floats
from shared.schemas import Offer

# an A100 computes so many tokens of an 8B model in about a second
QUANTUM_TOKENS = 16384
CREDIT_TOKENS = 2 * QUANTUM_TOKENS
STEP = 1e-6  # the share of its importance that a request loses for each quantum
STEPS = 999  # at most, so that only importances within a thousandth of each other can swap
LANES = 4096  # remembered at most; the one whose next turn is furthest behind is forgotten first
LATELY_S = 60.0  # a tenant whose last request came so lately counts as competing
LAST_SLOTS = 1 / 8

Lane = tuple[float, str]  # importance, tenant


@dataclass(slots=True)
class _Tenant:
    """A tenant that has requests here, or asked lately."""

    number: int  # never used again
    weight: float
    asked_unix_s: float
    requests: int = 0  # held, promised or asked for


class Fairness:
    """The turns of the requests that a replica holds, promised, or is asked to hold."""

    def __init__(self) -> None:
        self._turns: dict[Attempt, float] = {}
        self._next: dict[Lane, float] = {}  # the turn of the next request of each tenant
        self._newest: dict[float, float] = {}  # the latest turn within each importance
        self._tenants: dict[str, _Tenant] = {}
        self._numbers = 0

    @property
    def contested(self) -> bool:
        """True if several tenants have requests here, or asked lately."""
        return len(self._tenants) > 1

    def enter(self, offer: Offer, table: RequestTable, now_unix_s: float) -> None:
        """The request gets its turn: it is offered, or a resync found it here."""
        if attempt_of(offer) in self._turns:
            return
        importance, tenant = lane = lane_of(offer)
        known = self._tenants.get(tenant)
        if known is None:
            self._forget_tenants(now_unix_s)
            self._numbers += 1
            known = self._tenants[tenant] = _Tenant(self._numbers, offer.weight, now_unix_s)
        known.requests += 1
        known.weight, known.asked_unix_s = offer.weight, now_unix_s
        newest = self._newest.get(importance, 0.0)
        first = self._first(importance, table, newest) if self.contested else newest
        turn = max(self._next.get(lane, 0.0), first - CREDIT_TOKENS)
        self._turns[attempt_of(offer)] = turn
        self._next[lane] = turn + offer.prompt_tokens / offer.weight
        self._newest[importance] = max(newest, turn)
        if len(self._next) > LANES:
            self._forget_lane()

    def leave(self, offer: Offer, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """The request has left. Its tenant is charged for the tokens that were computed."""
        if self._turns.pop(attempt_of(offer), None) is None:
            return
        lane = lane_of(offer)
        self._tenants[lane[1]].requests -= 1
        if lane in self._next:
            unused = max(offer.prompt_tokens - prompt_tokens, 0)
            self._next[lane] += (output_tokens - unused) / offer.weight

    def seat(self, slot: int, table: RequestTable, now_unix_s: float) -> None:
        """The request has a row now: write its tenant and its turn there."""
        offer = table.offers[slot]
        self.enter(offer, table, now_unix_s)
        table.set_turn(slot, self._number(offer), self._turns[attempt_of(offer)])

    def crowds(self, offer: Offer, table: RequestTable, free_slots: int) -> bool:
        """True if the offer must leave the last free slots to other tenants: its own has its share
        of all slots, and no request here is less important.
        """
        if free_slots > LAST_SLOTS * table.capacity or not self.contested:
            return False
        tenant = self._tenants[lane_of(offer)[1]]
        share = tenant.weight / sum(each.weight for each in self._tenants.values())
        if tenant.requests <= share * table.capacity:
            return False
        return not bool((table.importance[: table.live] < offer.importance).any())

    def importance(
        self, table: RequestTable, offers: Sequence[Offer]
    ) -> tuple[Floats, list[Offer]]:
        """[live rows] the importance that a policy sees, and the offers with theirs."""
        rows = _prefills(table)
        level = np.append(table.importance[rows], [offer.importance for offer in offers])
        tenant = np.append(table.tenant[rows], [self._number(offer) for offer in offers])
        turn = np.append(table.turn[rows], [self._turns[attempt_of(offer)] for offer in offers])
        seen = level.copy()
        for importance in set(level.tolist()):
            among = np.flatnonzero(level == importance)
            if (tenant[among] == tenant[among[0]]).all():
                continue
            behind = (turn[among] - turn[among].min()) // QUANTUM_TOKENS
            seen[among] = importance * (1.0 - STEP * np.minimum(behind, STEPS))
        shown = table.importance[: table.live].copy()
        shown[rows] = seen[: len(rows)]
        return shown, [
            replace(offer, importance=own)
            for offer, own in zip(offers, seen[len(rows) :].tolist(), strict=True)
        ]

    def _forget_tenants(self, now_unix_s: float) -> None:
        """Forget the tenants without requests that have not asked lately."""
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if tenant.requests or now_unix_s - tenant.asked_unix_s < LATELY_S
        }

    def _number(self, offer: Offer) -> int:
        return self._tenants[lane_of(offer)[1]].number

    def _first(self, importance: float, table: RequestTable, newest: float) -> float:
        """The first turn of the prefills of this importance that wait; else the newest."""
        rows = _prefills(table)
        turns = table.turn[rows][table.importance[rows] == importance]
        return float(turns.min()) if len(turns) else newest

    def _forget_lane(self) -> None:
        lane = min(self._next, key=lambda lane: self._next[lane] - self._newest[lane[0]])
        del self._next[lane]
        if all(importance != lane[0] for importance, _ in self._next):
            del self._newest[lane[0]]


def lane_of(offer: Offer) -> Lane:
    return offer.importance, offer.key.partition(".")[0]


def _prefills(table: RequestTable) -> Indices:
    """The rows of the standard prefills."""
    n = table.live
    rows: Indices = ((table.phase[:n] != DECODE) & ~table.best_effort[:n]).nonzero()[0]
    return rows
