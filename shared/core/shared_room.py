"""Shares a limit among tenants (`Shares`), and lines up things that wait for a turn (`Line`). A
single tenant may have all the room. Where several have some, each may add things only up to its
share by weight; a tenant above its share gets nothing more until it is back within.
"""

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """Room for `limit` things (or bytes) of several tenants. If n tenants come in turn, each when
    it is full, they hold together at most limit * (1 + 1/2 + ... + 1/n): ten tenants 2.9 limits.
    """

    def __init__(self, limit: float) -> None:
        self.total = 0.0
        self._limit = limit
        self._held: dict[str, tuple[float, float]] = {}  # of those with any: amount, weight
        self._weights = 0.0  # of all of them

    def held(self, tenant: str) -> float:
        return self._held.get(tenant, (0.0, 0.0))[0]

    def fits(self, tenant: str, weight: float, amount: float = 1.0) -> bool:
        """True if this amount more of this tenant may come in."""
        if self.total + amount <= self._limit:
            return True
        held, counted = self._held.get(tenant, (0.0, 0.0))
        weights = self._weights - counted + weight
        return held + amount <= self._limit * (weight / weights)

    def take(self, tenant: str, weight: float, amount: float = 1.0) -> None:
        held, counted = self._held.get(tenant, (0.0, 0.0))
        self._held[tenant] = held + amount, weight
        self._weights += weight - counted
        self.total += amount

    def give(self, tenant: str, amount: float = 1.0) -> None:
        """This amount of the tenant's has left."""
        held, weight = self._held.pop(tenant)
        self.total -= amount
        if held > amount:
            self._held[tenant] = held - amount, weight
        elif self._held:
            self._weights -= weight
        else:
            self._weights = 0.0


class Line(Generic[T]):
    """Things that wait for work, of which `at_once` are worked on at a time. A tenant with none at
    work waits for no other; the next turn goes to the tenant that has the least of its share.
    """

    def __init__(self, at_once: int) -> None:
        self._work = Shares(at_once)
        self._waiting: dict[str, tuple[deque[T], float]] = {}  # by tenant, with its weight

    def join(self, tenant: str, weight: float, thing: T) -> None:
        waiting, _ = self._waiting.pop(tenant, (deque[T](), weight))
        waiting.append(thing)
        self._waiting[tenant] = waiting, weight

    def first(self, tenant: str) -> T | None:
        """The first waiting thing of this tenant; None if it has none."""
        return self._waiting[tenant][0][0] if tenant in self._waiting else None

    def next(self) -> T | None:
        """The thing that begins now; None if none may. Call `done` at its end."""
        if not self._waiting:
            return None
        tenant = min(
            self._waiting, key=lambda name: (self._work.held(name) + 1) / self._waiting[name][1]
        )
        waiting, weight = self._waiting[tenant]
        if self._work.held(tenant) and not self._work.fits(tenant, weight):
            return None
        self._work.take(tenant, weight)
        del self._waiting[tenant]
        thing = waiting.popleft()
        if waiting:  # among equals it is the last now
            self._waiting[tenant] = waiting, weight
        return thing

    def done(self, tenant: str) -> None:
        """One of the tenant's things that was at work is done."""
        self._work.give(tenant)
