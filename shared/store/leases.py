"""Leases, each a key that one process holds: which planner plans a replica, which admissions live,
which relegation instance acts. The key vanishes unless its holder writes it again. Standbys poll
it, as a watch does not tell of a TTL, and take it over early if the holder's connection has ended.
"""

from contextlib import suppress

import msgspec

from shared.bus.api import LEASE_TTL_S, KeyValue
from shared.clock import Clock
from shared.errors import UNDECODABLE, BusError, BusTimeout, WrongSequence
from shared.schemas import LeaseValue
from shared.store.presence import Absences

RENEW_S = 1.0
LOOK_S = 0.25  # between two looks of a standby for a free lease
SAFETY_S = 0.5  # the holder of an unanswered lease stops this long before another may have it

_encode = msgspec.msgpack.Encoder().encode
_value = msgspec.msgpack.Decoder(LeaseValue)


class Lease:
    """A key that at most one holder has. `epoch`, its revision when acquired, only rises."""

    def __init__(self, bucket: KeyValue, key: str, holder: str, absences: Absences) -> None:
        self._bucket = bucket
        self._absences = absences
        self.key = key
        self._value = _encode(LeaseValue(holder=holder))
        self._holder = holder
        self._revision = 0
        self.epoch = 0

    @property
    def held(self) -> bool:
        return self._revision > 0

    async def acquire(self) -> bool:
        """Take the lease if it is free or its holder is gone. Reads if an answer was lost."""
        held = await self._bucket.get(self.key)
        if held is not None and not await self._absences.gone(_holder_of(held.value)):
            return False
        try:
            self._revision = (
                await self._bucket.create(self.key, self._value)
                if held is None
                else await self._bucket.update(self.key, self._value, held.revision)
            )
        except WrongSequence:
            return False
        except BusTimeout:
            entry = await self._bucket.get(self.key)
            if entry is None or _holder_of(entry.value) != self._holder:
                return False
            self._revision = entry.revision
        self.epoch = self._revision
        return True

    async def renew(self) -> bool:
        """False if it is another's or ran out: stop at once. Raises BusTimeout without answer."""
        assert self.held
        try:
            self._revision = await self._bucket.update(self.key, self._value, self._revision)
        except WrongSequence:
            entry = await self._bucket.get(self.key)
            if entry is not None and _holder_of(entry.value) == self._holder:
                self._revision = entry.revision  # a renewal whose answer was lost
                return True
            self._revision = 0
            return False
        return True

    def lapse(self) -> None:
        """Renewals went unanswered too long: stop acting on the lease. It runs out by itself."""
        self._revision = 0

    async def release(self) -> None:
        if self.held and await self.renew():  # the lease may be another's by now
            self._revision = 0
            await self._bucket.delete(self.key)


class Leader:
    """Makes one of several instances act: the one that surely holds the lease."""

    def __init__(self, lease: Lease, clock: Clock) -> None:
        self._lease, self._clock = lease, clock
        self._renewed_unix_s = 0.0

    @property
    def leads(self) -> bool:
        return self._lease.held

    @property
    def pause_s(self) -> float:
        """Seconds until the next look."""
        return RENEW_S if self._lease.held else LOOK_S

    async def look(self) -> bool:
        """Take or renew the lease; in doubt, give it up in time. True if a term begins."""
        now = self._clock.unix_s()
        try:
            if not self._lease.held:
                if await self._lease.acquire():
                    self._renewed_unix_s = now
                    return True
            elif await self._lease.renew():
                self._renewed_unix_s = now
        except BusError:
            # asked now, as the renewal itself may have taken long
            late_s = self._clock.unix_s() - self._renewed_unix_s
            if self._lease.held and late_s > LEASE_TTL_S - SAFETY_S:
                self._lease.lapse()
        return False

    async def resign(self) -> None:
        """Give up the lease, so that another instance can begin at once."""
        with suppress(BusError):  # the lease runs out by itself
            await self._lease.release()


async def holder(bucket: KeyValue, key: str) -> str | None:
    """The holder of the lease; None if it is free."""
    entry = await bucket.get(key)
    return None if entry is None else _holder_of(entry.value)


async def lease_epoch(bucket: KeyValue, key: str) -> int:
    """An upper bound of the lease's epoch; 0 if the lease is free."""
    entry = await bucket.get(key)
    return 0 if entry is None else entry.revision


async def holders(bucket: KeyValue, prefix: str) -> dict[str, str]:
    """key -> holder, of every living lease under the prefix (ending in a dot)."""
    return {key: _holder_of(entry.value) for key, entry in await bucket.scan(prefix)}


def _holder_of(value: bytes) -> str:
    """The holder that the value names; empty if it names none: the key is held all the same."""
    try:
        return _value.decode(value).holder
    except UNDECODABLE:
        return ""
