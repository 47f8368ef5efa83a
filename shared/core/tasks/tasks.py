"""Counts the rounds of tasks, and gives each round its part of the time that its task has left.

A task is a session whose requests have one deadline (`task_ttlt_s`), counted from the arrival of
the first. A round begins with a request that comes when the one that began the round before has
ended; requests beside it are of the same round.
"""

import math
from collections import OrderedDict

from msgspec.structs import replace

from shared.core.tasks.forecast import Forecast
from shared.schemas import Record, TaskRound, TaskSoFar
from shared.vocabulary import LONGEST_S, SHORTEST_S

FORECASTS_LIMIT = 256  # applications, 30 KB each; the one used longest ago is forgotten
STORED_S = 10.0  # after its arrival, a request is stored by then or was refused


def joined(before: TaskSoFar | None, newest: Record | None, record: Record) -> TaskSoFar:
    """The task, once this request is one of it. `newest`: the record of `before.newest`, if there
    is one.
    """
    now = record.arrived_unix_s
    if before is None:
        return TaskSoFar(began_unix_s=now, rounds=1, newest=record.key, newest_unix_s=now)
    under_way = newest is not None and newest.verdict is None
    if newest is None:  # not stored yet; or refused, or ended so long ago that it is forgotten
        under_way = now - before.newest_unix_s < STORED_S
    if under_way or before.newest == record.key:
        return before
    return replace(before, rounds=before.rounds + 1, newest=record.key, newest_unix_s=now)


class Tasks:
    """The forecasts of all applications of all tenants, as far as one process has seen them."""

    def __init__(self) -> None:
        self._forecasts: OrderedDict[tuple[str, str], Forecast] = OrderedDict()

    def round_of(self, record: Record, task: TaskSoFar, before: Record | None) -> Record:
        """The record of a request of this task, with its round's deadline. `before`: the record
        that began the round before, where this one begins a round.

        An even part of the time that the task has left, less the pauses to come, would be that over
        the number of this round and those to come. The lengths of n rounds together vary by no more
        than the root of n times as much as that of one, so a round may take the root of n times its
        even part. A request without a session is a whole task.
        """
        slo, now = record.slo, record.arrived_unix_s
        assert slo.task_ttlt_s is not None
        forecast = self._forecast(record) if record.session else Forecast()
        if task.newest == record.key:
            ended = None if before is None else before.verdict
            pause_s = None if ended is None else max(now - ended.ended_unix_s, 0.0)
            forecast.began(task.rounds, pause_s)
        due_unix_s = task.began_unix_s + slo.task_ttlt_s
        to_come = forecast.rounds_to_come(task.rounds)
        own_s = (due_unix_s - now - to_come * forecast.pause_s) / math.sqrt(1 + to_come)
        if slo.ttlt_s is not None:
            own_s = min(own_s, slo.ttlt_s)
        return replace(
            record,
            slo=replace(slo, ttlt_s=min(max(own_s, SHORTEST_S), LONGEST_S)),
            task=TaskRound(number=task.rounds, due_unix_s=due_unix_s, ttlt_s=slo.ttlt_s),
        )

    def _forecast(self, record: Record) -> Forecast:
        of = record.key.partition(".")[0], record.application
        forecast = self._forecasts.setdefault(of, Forecast())
        self._forecasts.move_to_end(of)
        if len(self._forecasts) > FORECASTS_LIMIT:
            self._forecasts.popitem(last=False)
        return forecast
