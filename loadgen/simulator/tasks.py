"""The tasks of a simulation. Admission keeps them in the store; here they are in dictionaries."""

from shared.core.tasks.tasks import Tasks, joined
from shared.schemas import Record, TaskSoFar


class SimulatedTasks:
    def __init__(self) -> None:
        self._tasks = Tasks()
        # by tenant and session; and the record that began its newest round
        self._so_far: dict[tuple[str, str], tuple[TaskSoFar, Record]] = {}

    def received(self, record: Record) -> Record:
        """The record of a request that arrives, with its round's deadline if it is of a task."""
        if record.slo.task_ttlt_s is None:
            return record
        task, newest = self._so_far.get(_of(record), (None, None))
        after = joined(task, newest, record)
        begins = after != task
        if begins:
            self._so_far[_of(record)] = after, record
        return self._tasks.round_of(record, after, newest if begins else None)

    def ended(self, record: Record) -> None:
        task, newest = self._so_far.get(_of(record), (None, None))
        if task is not None and newest is not None and newest.key == record.key:
            self._so_far[_of(record)] = task, record


def _of(record: Record) -> tuple[str, str]:
    return record.key.partition(".")[0], record.session or record.key
