"""Counts the work in the best-effort pool by tenant, and how long a new request would wait.
Relegation counts it (`PoolWork`); admission reads its digest, and adds what it sent (`PoolRoom`).
"""

import math
from collections import deque
from collections.abc import Iterable
from heapq import nlargest

from msgspec.structs import replace

from shared.core.relegation.pool import lane_of
from shared.schemas import PoolDigest, PoolLane, Record

LANES_LIMIT = 1024  # lanes in a digest: those with most work
ON_ITS_WAY_S = 0.5  # what was sent this long before a digest came may be missing there
RETRY_MIN_S, RETRY_MAX_S = 1.0, 30.0
# The part of its time that a request is estimated to wait at most. The rest is for what the
# estimate does not see: important work that comes later, replicas that take less.
SURE = 0.75


class PoolWork:
    """The work of each tenant at each importance, for each model."""

    def __init__(self, lanes: Iterable[PoolLane] = ()) -> None:
        self._lanes: dict[tuple[float, str, str], PoolLane] = {
            (-lane.importance, lane.tenant, lane.model): lane for lane in lanes
        }

    def add(self, record: Record, sign: int = 1) -> None:
        """One request more; with `sign` -1, one less."""
        key = (*lane_of(record), record.model)
        lane = self._lanes.get(key) or PoolLane(
            tenant=key[1],
            importance=record.importance,
            weight=record.weight,
            requests=0,
            tokens=0,
            model=record.model,
        )
        if lane.requests + sign > 0:
            tokens = lane.tokens + sign * record.work_tokens
            self._lanes[key] = replace(lane, requests=lane.requests + sign, tokens=tokens)
        else:
            self._lanes.pop(key, None)

    def lanes(self) -> list[PoolLane]:
        """The lanes with the most work, LANES_LIMIT at most."""
        return nlargest(LANES_LIMIT, self._lanes.values(), key=lambda lane: lane.tokens)

    def before(self, record: Record) -> int:
        """Tokens that have their turn before this request ends, its own included. More important
        work goes first. Of another tenant's equally important work, only as much goes first as is
        given to it by weight in that time (shared/core/relegation/pool.py). Work of another model
        takes nothing of its time.
        """
        mine = (*lane_of(record), record.model)
        own = self._lanes.get(mine)
        brought = record.work_tokens + (own.tokens if own else 0)
        before = float(brought)
        for lane, work in self._lanes.items():
            if record.model and work.model not in ("", record.model):
                continue
            if lane[0] < mine[0]:
                before += work.tokens
            elif lane[0] == mine[0] and lane != mine:
                before += min(work.tokens, brought * work.weight / record.weight)
        return int(before)

    def requests(self, tenant: str) -> int:
        return sum(work.requests for lane, work in self._lanes.items() if lane[1] == tenant)

    def tenants(self) -> set[str]:
        return {tenant for _, tenant, _ in self._lanes}


class PoolRoom:
    """The room for further requests in the pool, as one admission knows it."""

    def __init__(self, requests_limit: int) -> None:
        """`requests_limit`: requests in the pool, shared equally by the tenants that have any."""
        self._limit = requests_limit
        self._tokens_s = 0.0  # 0: nothing is known
        self._rates: dict[str, float] = {}  # the part of each model, if there are several
        self._work = PoolWork()
        self._sent: deque[tuple[float, Record]] = deque()  # (unix_s, what was sent then)

    def heard(self, digest: PoolDigest, now_unix_s: float) -> None:
        while self._sent and self._sent[0][0] < now_unix_s - ON_ITS_WAY_S:
            self._sent.popleft()
        self._tokens_s, self._rates = digest.tokens_s, digest.rates
        self._work = PoolWork(digest.lanes)
        for _, record in self._sent:
            self._work.add(record)

    def sent(self, record: Record, now_unix_s: float) -> None:
        """This record goes into the pool now."""
        self._sent.append((now_unix_s, record))
        self._work.add(record)

    def retry_after_s(self, record: Record, now_unix_s: float) -> float | None:
        """None if the request most likely has its turn in time; else seconds until another may."""
        tenant = lane_of(record)[1]
        tenants = self._work.tenants() | {tenant}
        if self._work.requests(tenant) >= self._limit / len(tenants):
            return RETRY_MAX_S
        tokens_s = self._rates.get(record.model, self._tokens_s)
        if not tokens_s:
            return None
        done_unix_s = now_unix_s + self._work.before(record) / tokens_s
        late_s = done_unix_s - now_unix_s - SURE * (record.leaves_pool_unix_s - now_unix_s)
        if late_s <= 0.0:
            return None
        return min(max(float(math.ceil(late_s)), RETRY_MIN_S), RETRY_MAX_S)
