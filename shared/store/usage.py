"""Sums up what each tenant uses, by day, in a bucket of the store: `slackline usage` reads it.

A process adds what ended in its hands every few seconds. A sum names the last additions of its
writers, so that none counts twice, even where the answer to a write was lost.
"""

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec
import structlog
from msgspec import Struct

from shared.bus.api import KeyValue
from shared.errors import BusError, BusTimeout, PeerError, WrongSequence
from shared.schemas import Verdict
from shared.store.seal import read, readable
from shared.vocabulary import RequestKey

STORE_EVERY_S = 10.0  # a process that is killed loses the requests of as long
KEPT_S = 400 * 86_400.0  # a year, and the month in which somebody asks about it
WRITERS = 16  # that a sum remembers: one of them retries for a few additions at most
RETRIES = 8  # of a write that lost its race; a few processes write, each every STORE_EVERY_S

log = structlog.get_logger()


class DaySum(Struct, frozen=True, kw_only=True):
    """The use of one tenant: its requests that ended on one day (UTC), and their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    writers: dict[str, int] = {}  # the last addition of each of the latest writers

    def plus(self, other: "DaySum") -> "DaySum":
        return DaySum(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            writers=self.writers,
        )


@dataclass(frozen=True, slots=True)
class Addition:
    """The part that one process adds to one sum in one write."""

    number: int
    used: DaySum

    def to(self, before: DaySum, writer: str) -> DaySum:
        others = {name: n for name, n in before.writers.items() if name != writer}
        latest = dict(list(others.items())[1 - WRITERS :])
        return msgspec.structs.replace(
            before.plus(self.used), writers={**latest, writer: self.number}
        )


_sum = msgspec.msgpack.Decoder(DaySum)


def tokens_used(verdict: Verdict) -> tuple[int, int]:
    """The tokens of prompt and of output that a request used: none if it had no output."""
    return (verdict.prompt_tokens if verdict.output_tokens else 0), verdict.output_tokens


def sum_key(tenant: str, at_unix_s: float) -> str:
    """`2026-11.acme.30`: so one prefix has the whole month."""
    day = dt.datetime.fromtimestamp(at_unix_s, dt.UTC)
    return f"{day:%Y-%m}.{tenant}.{day:%d}"


class Usage:
    """The use that one process has counted and not stored yet: a sum for each tenant and day."""

    def __init__(self, bucket: KeyValue, writer: str) -> None:
        self._bucket, self._writer = bucket, writer
        self._numbers: Callable[[], int] = count(1).__next__
        self._new: dict[str, DaySum] = {}
        self._additions: dict[str, Addition] = {}  # each may have been written already

    def add(self, key: RequestKey, verdict: Verdict) -> None:
        """Count a request that ended."""
        day = sum_key(key.partition(".")[0], verdict.ended_unix_s)
        prompt_tokens, output_tokens = tokens_used(verdict)
        used = DaySum(requests=1, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self._new[day] = used.plus(self._new.get(day, DaySum()))

    async def run(self) -> None:
        """Store what is new every STORE_EVERY_S, until cancelled."""
        while True:
            await asyncio.sleep(STORE_EVERY_S)
            await self.store()

    async def store(self) -> None:
        """Store what is new. What cannot be stored now stays for the next time."""
        for day in [*self._additions, *self._new]:  # a day of both comes twice
            if day not in self._additions:
                self._additions[day] = Addition(self._numbers(), self._new.pop(day))
            try:
                await self._write(day, self._additions[day])
            except BusError as error:
                log.warning("usage.unstored", day=day, error=str(error))
                return  # the others would not fare better
            except PeerError as error:  # the sum is damaged
                log.error("usage.unstored", day=day, error=str(error))
                continue
            del self._additions[day]

    async def _write(self, day: str, addition: Addition) -> None:
        """Write the addition into its sum, once. Raises BusError, PeerError."""
        for _ in range(RETRIES):
            entry = await self._bucket.get(day)
            before = DaySum() if entry is None else read(_sum, day, entry.value)
            if before.writers.get(self._writer) == addition.number:
                return  # an earlier write of it arrived
            value = readable(_sum, addition.to(before, self._writer))
            try:
                if entry is None:
                    await self._bucket.create(day, value, ttl_s=KEPT_S)
                else:
                    await self._bucket.update(day, value, entry.revision, ttl_s=KEPT_S)
            except WrongSequence:
                continue
            return
        raise BusTimeout(f"the sum {day} kept changing")


async def month_sums(bucket: KeyValue, month: str) -> dict[str, DaySum]:
    """The sum of each tenant in a month, such as `2026-11`. Raises BusError, StoreDamaged."""
    found: dict[str, DaySum] = {}
    for key, entry in await bucket.scan(f"{month}."):
        tenant = key.split(".")[1]
        found[tenant] = read(_sum, key, entry.value).plus(found.get(tenant, DaySum()))
    return found
