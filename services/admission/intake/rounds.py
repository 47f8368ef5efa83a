"""Gives the rounds of tasks their deadlines when they arrive."""

from services.admission.intake.task_store import Joined, TaskStore
from shared.core.tasks.tasks import Tasks, joined
from shared.errors import PeerError
from shared.schemas import Record


class Rounds:
    def __init__(self, store: TaskStore) -> None:
        self._store, self._tasks = store, Tasks()

    async def of(self, record: Record) -> Record:
        """The record, not stored yet, with its round's deadline if it is of a task. Raises
        BusError; PeerError for a task that was due before, if the round may not be served late.
        """
        if record.slo.task_ttlt_s is None:
            return record
        if record.session:
            task, before = await self._store.join(record)
        else:
            task, before = Joined(joined(None, None, record), None)
        record = self._tasks.round_of(record, task, before)
        assert record.task is not None
        if not record.allow_relegation and record.task.due_unix_s <= record.arrived_unix_s:
            raise PeerError(
                "the task's deadline has passed", code="unattainable_slo", param="slo.task_ttlt_s"
            )
        return record
