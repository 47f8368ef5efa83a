"""The durable state of the simulated broker: buckets and the log, as JetStream has them. Callers
pass the time.

Every call happens at one instant, so the operations of all connections have one order.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.bus.api import Entry
from shared.errors import WrongSequence

MARKER_TTL_S = 5.0  # as in shared/bus/jetstream.py: the marker of a deleted key expires
MIN_TTL_S = 1.0  # the least that the server takes


@dataclass(frozen=True, slots=True)
class _Kept:
    value: bytes | None  # None: the marker of a deletion
    revision: int
    until_s: float


class BucketState:
    """A KV bucket. Revisions are sequences of its stream: they rise over all keys together."""

    def __init__(self, name: str, max_age_s: float = math.inf) -> None:
        self.name = name
        self._max_age_s = max_age_s
        self._kept: dict[str, _Kept] = {}
        self._seq = 0

    def get(self, key: str, *, now_s: float) -> Entry | None:
        kept = self._present(key, now_s)
        return None if kept is None or kept.value is None else Entry(kept.value, kept.revision)

    def create(self, key: str, value: bytes, ttl_s: float | None, *, now_s: float) -> int:
        kept = self._present(key, now_s)
        if kept is not None and kept.value is not None:
            raise WrongSequence(f"{self.name}: {key} is there", kept.revision)
        return self._put(key, value, ttl_s, now_s)

    def update(
        self, key: str, value: bytes, revision: int, ttl_s: float | None, *, now_s: float
    ) -> int:
        kept = self._present(key, now_s)
        present = 0 if kept is None else kept.revision
        if present != revision:
            raise WrongSequence(f"{self.name}: {key} is at {present}, not {revision}", present)
        return self._put(key, value, ttl_s, now_s)

    def delete(self, key: str, *, now_s: float) -> int:
        return self._put(key, None, MARKER_TTL_S, now_s)

    def names(self, *, now_s: float) -> Sequence[str]:
        return [key for key in list(self._kept) if self._present(key, now_s) is not None]

    def scan(self, prefix: str, since: int = 1, *, now_s: float) -> Sequence[tuple[str, Entry]]:
        """The keys with this prefix, in the order of their last writes, as a stream is read."""
        found = [
            (key, Entry(kept.value, kept.revision))
            for key in [key for key in self._kept if key.startswith(prefix)]
            if (kept := self._present(key, now_s)) is not None and kept.value is not None
            if kept.revision >= since
        ]
        return sorted(found, key=lambda item: item[1].revision)

    def _present(self, key: str, now_s: float) -> _Kept | None:
        kept = self._kept.get(key)
        if kept is not None and kept.until_s <= now_s:
            del self._kept[key]
            return None
        return kept

    def _put(self, key: str, value: bytes | None, ttl_s: float | None, now_s: float) -> int:
        self._seq += 1
        life_s = self._max_age_s if ttl_s is None else min(self._max_age_s, max(MIN_TTL_S, ttl_s))
        self._kept[key] = _Kept(value, self._seq, now_s + life_s)
        return self._seq


class LogState:
    """An append-only stream. A subject trimmed to nothing has last sequence 0 again, as in
    JetStream.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._subjects: dict[str, list[tuple[int, bytes]]] = {}
        self._seq = 0

    def append(self, subject: str, payload: bytes, expected_last: int) -> int:
        entries = self._subjects.setdefault(subject, [])
        present = entries[-1][0] if entries else 0
        if present != expected_last:
            raise WrongSequence(
                f"{self.name}: {subject} is at {present}, not {expected_last}", present
            )
        self._seq += 1
        entries.append((self._seq, payload))
        return self._seq

    def last(self, subject: str) -> tuple[int, bytes] | None:
        entries = self._subjects.get(subject)
        return entries[-1] if entries else None

    def read(self, subject: str, after: int) -> Sequence[tuple[int, bytes]]:
        entries = self._subjects.get(subject, [])
        return entries[bisect.bisect_right(entries, after, key=lambda entry: entry[0]) :]

    def trim(self, subject: str, below: int) -> None:
        entries = self._subjects.get(subject, [])
        del entries[: bisect.bisect_left(entries, below, key=lambda entry: entry[0])]
