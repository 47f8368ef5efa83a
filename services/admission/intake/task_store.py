"""Keeps in the store how far each task is, since its rounds reach different admissions. A task is
remembered for as long after its due time, and after its newest round, as ended requests are.
"""

import hashlib
from typing import NamedTuple

import msgspec

from shared.bus.api import KeyValue
from shared.core.tasks.tasks import joined
from shared.errors import BusTimeout, WrongSequence
from shared.schemas import Record, TaskSoFar
from shared.store.outputs import ENDED_TTL_S
from shared.store.records import Records
from shared.store.seal import read, readable

RETRIES = 8  # of a write that lost its race; then most find that the round has begun
NAME_BYTES = 16  # a session is any text: its digest is in the key

_decoder = msgspec.msgpack.Decoder(TaskSoFar)


class Joined(NamedTuple):
    task: TaskSoFar
    before: Record | None  # of the round before, where this request begins a round


class TaskStore:
    """The tasks, each under `t.<tenant>.<digest of its session>` beside the records."""

    def __init__(self, bucket: KeyValue, records: Records) -> None:
        self._bucket, self._records = bucket, records

    async def join(self, record: Record) -> Joined:
        """The task of this request's session, with this request. Raises BusError."""
        tenant = record.key.partition(".")[0]
        session = hashlib.blake2b(record.session.encode(), digest_size=NAME_BYTES).hexdigest()
        name = f"t.{tenant}.{session}"
        for _ in range(RETRIES):
            entry = await self._bucket.get(name)
            before = None if entry is None else read(_decoder, name, entry.value)
            stored = None if before is None else await self._records.get(before.newest)
            newest = None if stored is None else stored.record
            task = joined(before, newest, record)
            if task == before:
                return Joined(task, None)
            value = readable(_decoder, task)
            ttl_s = _ends_in_s(task, record) + ENDED_TTL_S
            try:
                if entry is None:
                    await self._bucket.create(name, value, ttl_s=ttl_s)
                else:
                    await self._bucket.update(name, value, entry.revision, ttl_s=ttl_s)
                return Joined(task, newest)
            except WrongSequence:
                continue
        raise BusTimeout(f"the task of {record.key} kept changing")


def _ends_in_s(task: TaskSoFar, record: Record) -> float:
    assert record.slo.task_ttlt_s is not None
    due_unix_s = task.began_unix_s + record.slo.task_ttlt_s
    return max(due_unix_s - record.arrived_unix_s, 0.0)
