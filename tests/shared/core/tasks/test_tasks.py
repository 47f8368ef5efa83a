"""Tests of how rounds of a task are counted, and of the time that each is given."""

import math

from msgspec.structs import replace

from shared.core.record.verdict import ended
from shared.core.tasks.tasks import STORED_S, Tasks, joined
from shared.measure import Measure
from shared.schemas import Record, Resume, TaskSoFar
from shared.vocabulary import SHORTEST_S, FinishReason, Missed, Slo
from tests import made

TASK_S = 60.0


def asked(name: str, at_s: float, slo: Slo | None = None, session: str = "s") -> Record:
    slo = slo or Slo(task_ttlt_s=TASK_S)
    return made.record(
        f"t.{name}", slo=slo, session=session, application="agent", arrived_unix_s=at_s
    )


def done(record: Record, at_s: float) -> Record:
    """The record, ended well with its last token at this instant."""
    measure = Measure.begin(record.slo, record.arrived_unix_s).emit(5, at_s, record.slo)
    resume = Resume(tokens=b"\0" * 20, measure=measure)
    return ended(record, FinishReason.LENGTH, resume, at_s)


class Session:
    """A session that is one task, its requests one after another."""

    def __init__(self, tasks: Tasks, name: str = "s") -> None:
        self.tasks, self.name = tasks, name
        self.task: TaskSoFar | None = None
        self.newest: Record | None = None

    def round(self, at_s: float, lasts_s: float, slo: Slo | None = None) -> Record:
        record = asked(f"{self.name}-{at_s:g}".replace(".", "_"), at_s, slo, self.name)
        self.task = joined(self.task, self.newest, record)
        record = self.tasks.round_of(record, self.task, self.newest)
        self.newest = done(record, at_s + lasts_s)
        return record


def numbers(*requests: tuple[str, float, Record | None]) -> list[int]:
    """The rounds after each request: its name, when it came, and the newest round's record."""
    task, found = None, []
    for name, at_s, newest in requests:
        task = joined(task, newest, asked(name, at_s))
        found.append(task.rounds)
    return found


def test_a_round_begins_when_the_one_before_has_ended() -> None:
    first = done(asked("a", 0.0), 2.0)
    assert numbers(("a", 0.0, None), ("b", 3.0, first)) == [1, 2]


def test_requests_beside_one_another_are_of_one_round() -> None:
    running = asked("a", 0.0)
    assert numbers(("a", 0.0, None), ("b", 1.0, running), ("c", 2.0, running)) == [1, 1, 1]


def test_choices_that_come_before_the_first_is_stored_are_of_one_round() -> None:
    assert numbers(("a", 0.0, None), ("b", 0.0, None), ("c", 0.01, None)) == [1, 1, 1]


def test_a_request_that_was_never_stored_or_is_forgotten_does_not_hold_up_the_count() -> None:
    assert numbers(("a", 0.0, None), ("b", 2 * STORED_S, None)) == [1, 2]


def test_a_request_that_is_sent_again_is_no_further_round() -> None:
    first = done(asked("a", 0.0), 2.0)
    assert numbers(("a", 0.0, None), ("a", 3.0, first), ("b", 4.0, first)) == [1, 1, 2]


def test_the_first_task_gives_each_round_all_of_the_time_that_is_left() -> None:
    session = Session(Tasks())
    first, second = session.round(100.0, 15.0), session.round(120.0, 1.0)
    assert (first.slo.ttlt_s, second.slo.ttlt_s) == (60.0, 40.0)
    assert [each.task.due_unix_s for each in (first, second) if each.task] == [160.0, 160.0]


def learned(pause_s: float) -> Tasks:
    """Tasks of three rounds, with pauses of this length between them."""
    tasks = Tasks()
    for n in range(30):
        session = Session(tasks, f"before-{n}")
        for turn in range(3):
            session.round((4.0 + pause_s) * turn, 4.0)
    return tasks


def test_a_round_gets_its_part_of_the_time_left_without_the_pauses_to_come() -> None:
    """So slack that early rounds did not use is there for later ones, which lose what they did."""
    tasks = learned(pause_s=6.0)
    quick, slow = Session(tasks, "quick"), Session(tasks, "slow")
    assert quick.round(0.0, 1.0).slo.ttlt_s == (60.0 - 2 * 6.0) / math.sqrt(3)
    assert slow.round(0.0, 40.0).slo.ttlt_s == (60.0 - 2 * 6.0) / math.sqrt(3)
    assert quick.round(7.0, 1.0).slo.ttlt_s == (53.0 - 6.0) / math.sqrt(2)
    assert slow.round(46.0, 1.0).slo.ttlt_s == (14.0 - 6.0) / math.sqrt(2)
    assert quick.round(14.0, 1.0).slo.ttlt_s == 46.0


def test_a_task_whose_pauses_will_take_longer_than_it_has_is_given_no_time() -> None:
    """Its rounds are best-effort, and told so early; it may still be in time."""
    record = Session(learned(pause_s=30.0), "behind").round(0.0, 1.0, Slo(task_ttlt_s=59.0))
    assert record.slo.ttlt_s == SHORTEST_S
    verdict = done(record, 58.0).verdict
    assert verdict is not None and verdict.slo_met


def test_applications_and_tenants_learn_apart() -> None:
    tasks = learned(pause_s=6.0)
    other = replace(asked("a", 0.0), application="chat")
    given = tasks.round_of(other, joined(None, None, other), None)
    assert given.slo.ttlt_s == TASK_S


def test_the_verdict_is_by_the_task_and_not_by_the_part_of_a_round() -> None:
    session = Session(Tasks())
    record = session.round(0.0, 1.0)
    tight = replace(record, slo=replace(record.slo, ttlt_s=2.0))
    in_time, late = done(tight, 59.0).verdict, done(tight, 61.0).verdict
    assert in_time is not None and in_time.slo_met and in_time.task_left_s == 1.0
    assert late is not None and late.missed is Missed.TTLT and late.task_left_s == -1.0


def test_a_bound_of_the_round_itself_holds_beside_the_task() -> None:
    slo = Slo(ttlt_s=5.0, task_ttlt_s=TASK_S)
    record = Session(Tasks()).round(0.0, 6.0, slo)
    verdict = done(record, 6.0).verdict
    assert record.slo.ttlt_s == 5.0
    assert verdict is not None and verdict.missed is Missed.TTLT and verdict.task_left_s == 54.0


def test_a_round_after_the_task_was_due_has_no_time_and_is_late() -> None:
    session = Session(Tasks())
    session.round(0.0, 70.0)
    record = session.round(71.0, 1.0)
    verdict = done(record, 72.0).verdict
    assert record.slo.ttlt_s == SHORTEST_S
    assert verdict is not None and verdict.missed is Missed.TTLT


def test_a_request_without_a_session_is_a_task_of_its_own() -> None:
    tasks = Tasks()
    for at_s in (0.0, 10.0):
        record = asked(f"a{at_s:g}", at_s, session="")
        record = tasks.round_of(record, joined(None, None, record), None)
        assert record.slo.ttlt_s == TASK_S
        assert record.task is not None and record.task.number == 1
