"""The order in which requests of the best-effort pool are placed: by importance, then by the tokens
that their tenant was given (the fewest first), then by age. nearest.py then looks at prefixes.

Replicas take only requests of their model whose needs they meet. Requests with the same of both
have an order, and the first of these orders' firsts is next. A step costs the logarithm of the
number of tenants, and a search in a tenant's requests. A heap's entry is corrected only at the top,
which is enough: a waiting tenant's tokens only grow. Entries of tenants that left are swept once
most are void.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, KeysView
from heapq import heapify, heappop, heappush, heapreplace

from shared.schemas import Record
from shared.vocabulary import RequestKey

FORGET_S = 600.0  # a tenant without a waiting request for this long begins anew
SWEEP_MIN = 64  # heap entries; a shorter heap is not swept

Lane = tuple[float, str]  # (-importance, tenant)
Item = tuple[float, RequestKey, Lane]  # arrived_unix_s, ...
Wants = tuple[str, tuple[str, ...]]  # model and needs of a record
# -importance, given, then the oldest item of the lane
Rank = tuple[float, float, float, RequestKey, Lane]


def lane_of(record: Record) -> Lane:
    return -record.importance, record.key.partition(".")[0]


class _Level:
    """The tenants of one importance."""

    def __init__(self) -> None:
        self.given: dict[str, float] = {}
        self.waiting: dict[str, int] = {}  # requests of each tenant that has any
        # tokens given to the waiting tenant with the least; if none waits, to the last that left
        self.floor = 0.0
        # heap of all waiting tenants; an entry is at most what the tenant was given
        self._least: list[tuple[float, str]] = []

    def enter(self, tenant: str) -> None:
        self.waiting[tenant] = self.waiting.get(tenant, 0) + 1
        if self.waiting[tenant] > 1:
            return
        self.given[tenant] = max(self.given.get(tenant, 0.0), self.floor)
        heappush(self._least, (self.given[tenant], tenant))
        if len(self._least) > 2 * len(self.waiting) + SWEEP_MIN:
            self._least = [(self.given[t], t) for t in self.waiting]
            heapify(self._least)
        self._lift()

    def leave(self, tenant: str) -> None:
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
            if not self.waiting:
                self.floor = max(self.floor, self.given[tenant])
            self._lift()

    def give(self, tenant: str, tokens: float) -> None:
        self.given[tenant] += tokens
        self._lift()

    def _lift(self) -> None:
        while self._least:
            given, tenant = self._least[0]
            if tenant not in self.waiting:
                heappop(self._least)
            elif given != self.given[tenant]:
                heapreplace(self._least, (self.given[tenant], tenant))
            else:
                self.floor = given
                return


class Shares:
    """The tokens given to each tenant, divided by its weight, for each importance: only equals
    compete. A tenant that begins to wait starts at the least of the waiting tenants, so neither a
    new name nor absence is a credit.

    Source: the Virtual Token Counter and its lift, Y. Sheng et al., "Fairness in Serving Large
    Language Models", OSDI 2024, algorithm 2, after P. Goyal et al., "Start-time Fair Queuing",
    SIGCOMM 1996; deviation: prompt tokens only, and a tenant is forgotten after FORGET_S.
    """

    def __init__(self) -> None:
        self._levels: dict[float, _Level] = {}
        # tenants of which no request waits, and since when
        self._away: OrderedDict[Lane, float] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(level.given) for level in self._levels.values())

    def given(self, lane: Lane) -> float:
        return self._levels[lane[0]].given[lane[1]]

    def enter(self, lane: Lane, now_unix_s: float) -> None:
        """One more request of this tenant waits."""
        self._away.pop(lane, None)
        while self._away and next(iter(self._away.values())) < now_unix_s - FORGET_S:
            self._forget(*self._away.popitem(last=False)[0])
        self._levels.setdefault(lane[0], _Level()).enter(lane[1])

    def leave(self, lane: Lane, now_unix_s: float) -> None:
        """One request of this tenant waits no longer."""
        level = self._levels[lane[0]]
        level.leave(lane[1])
        if lane[1] not in level.waiting:
            self._away[lane] = now_unix_s

    def give(self, lane: Lane, tokens: float) -> None:
        """The tenant was given this many tokens (divided by its weight)."""
        self._levels[lane[0]].give(lane[1], tokens)

    def _forget(self, importance: float, tenant: str) -> None:
        level = self._levels[importance]
        del level.given[tenant]
        if not level.given:
            del self._levels[importance]


class FairOrder:
    """The order of waiting records with equal needs, all of which have entered `shares`."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._items: dict[RequestKey, Item] = {}
        self._lined: dict[Lane, list[Item]] = {}  # the items of each lane, the oldest first
        # heap: each lane has one entry that counts, never above its true rank; others are void
        self._ranks: list[Rank] = []
        self._rank: dict[Lane, Rank] = {}  # the entry that counts

    def __len__(self) -> int:
        return len(self._items)

    def add(self, record: Record) -> None:
        lane = lane_of(record)
        item = self._items[record.key] = (record.arrived_unix_s, record.key, lane)
        insort(self._lined.setdefault(lane, []), item)
        rank, known = self._rank_of(item), self._rank.get(lane)
        if known is None or rank < known:
            self._rank[lane] = rank
            heappush(self._ranks, rank)
        self._sweep()

    def discard(self, key: RequestKey) -> None:
        item = self._items.pop(key, None)
        if item is None:
            return
        line = self._lined[item[2]]
        del line[bisect_left(line, item)]
        if not line:
            del self._lined[item[2]], self._rank[item[2]]
        self._sweep()

    def first(self) -> Rank | None:
        """The rank of the next record; None if there is none."""
        while self._ranks:
            rank = self._ranks[0]
            lane = rank[-1]
            if self._rank.get(lane) is not rank:
                heappop(self._ranks)
                continue
            now = self._rank_of(self._lined[lane][0])
            if now == rank:
                return now
            self._rank[lane] = now
            heapreplace(self._ranks, now)
        return None

    def line(self, key: RequestKey, most: int) -> list[RequestKey]:
        """The `most` oldest of the record's tenant and importance."""
        return [item[1] for item in self._lined[self._items[key][2]][:most]]

    def _rank_of(self, item: Item) -> Rank:
        return item[2][0], self._shares.given(item[2]), *item

    def _sweep(self) -> None:
        """Build the heap anew once most entries are void."""
        if len(self._ranks) > 2 * len(self._rank) + SWEEP_MIN:
            self._ranks = list(self._rank.values())
            heapify(self._ranks)


class Order:
    """The order of waiting records: a FairOrder for each model and set of needs."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._orders: dict[Wants, FairOrder] = {}
        self._wants: dict[RequestKey, Wants] = {}

    def add(self, record: Record) -> None:
        wants = self._wants[record.key] = (record.model, record.needs)
        if wants not in self._orders:
            self._orders[wants] = FairOrder(self._shares)
        self._orders[wants].add(record)

    def discard(self, key: RequestKey) -> None:
        wants = self._wants.pop(key, None)
        if wants is not None:
            self._orders[wants].discard(key)
            if not self._orders[wants]:
                del self._orders[wants]

    def keys(self) -> KeysView[RequestKey]:
        return self._wants.keys()

    def of(self, model: str) -> int:
        """The number of records that a replica of this model may take, were their needs met."""
        return sum(len(order) for (of, _), order in self._orders.items() if of in ("", model))

    def line(self, key: RequestKey, most: int) -> list[RequestKey]:
        """The `most` oldest of the record's tenant, importance and wants."""
        return self._orders[self._wants[key]].line(key, most)

    def first(self, suits: Callable[[Wants], bool]) -> RequestKey | None:
        """The next record with suitable wants; None if there is none."""
        ranks = [
            rank
            for wants, order in self._orders.items()
            if suits(wants) and (rank := order.first()) is not None
        ]
        return min(ranks)[3] if ranks else None
