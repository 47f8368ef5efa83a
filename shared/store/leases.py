"""Leases: who plans which replica, which admissions and relegation holder live. A key vanishes
unless its holder writes it again; it is polled, as a watch says nothing of a TTL. It is taken over
early if the holder's connection has ended.
"""

from contextlib import suppress

import msgspec

from shared.bus.api import LEASE_TTL_S, KeyValue
from shared.clock import Clock
from shared.errors import UNDECODABLE, BusError, BusTimeout, WrongSequence
from shared.schemas import LeaseValue
from shared.store.presence import Absences

RENEW_S = 1.0
LOOK_S = 0.25  # between two looks of a standby whether the lease is free
SAFETY_S = 0.5  # before an unanswered lease may be another's, its holder stops

_encode = msgspec.msgpack.Encoder().encode
_value = msgspec.msgpack.Decoder(LeaseValue)


class Lease:
    """A key that one holder has at most. `revision` when acquired, its fencing number, rises."""

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
        """Take the lease if it is free, or its holder gone. Reads where an answer was lost."""
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
        """False: another has it, or it ran out: stop at once. Raises BusTimeout if none answers."""
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
        """Renewals went unanswered for too long: stop acting on it. It runs out by itself."""
        self._revision = 0

    async def release(self) -> None:
        if self.held and await self.renew():  # it may be another's by now
            self._revision = 0
            await self._bucket.delete(self.key)


class Leader:
    """The one of several instances that acts: it surely holds the lease."""

    def __init__(self, lease: Lease, clock: Clock) -> None:
        self._lease, self._clock = lease, clock
        self._renewed_unix_s = 0.0

    @property
    def leads(self) -> bool:
        return self._lease.held

    @property
    def pause_s(self) -> float:
        """Until the next look."""
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
        """Let the next one begin at once."""
        with suppress(BusError):  # it runs out by itself
            await self._lease.release()


async def holder(bucket: KeyValue, key: str) -> str | None:
    """The holder of the lease; None if it is free."""
    entry = await bucket.get(key)
    return None if entry is None else _holder_of(entry.value)


async def lease_epoch(bucket: KeyValue, key: str) -> int:
    """A number that the lease's epoch does not exceed; 0 if it is free."""
    entry = await bucket.get(key)
    return 0 if entry is None else entry.revision


async def holders(bucket: KeyValue, prefix: str) -> dict[str, str]:
    """key -> holder, of every living lease under the prefix (ending in a dot)."""
    return {key: _holder_of(entry.value) for key, entry in await bucket.scan(prefix)}


def _holder_of(value: bytes) -> str:
    """The holder that the value names; empty if it is no lease, which holds it all the same."""
    try:
        return _value.decode(value).holder
    except UNDECODABLE:
        return ""
