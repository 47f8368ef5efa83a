"""Tests of simulated tasks: sessions whose rounds have one deadline together."""

import math

import pytest

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.trials.figures import figures_of
from loadgen.trials.trial import Trial
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Missed, Slo
from tests.loadgen import planned

PAUSE_S = 2.0


def tiers(task_s: float) -> TierSet:
    return TierSet(name="t", default="a", tiers={"a": Tier(slo=Slo(task_ttlt_s=task_s))})


def session(first: int, rounds: int, arrival_s: float = 0.0) -> list[PlannedRequest]:
    return [
        planned.one(first + n, 200, 50, "a", arrival_s)._replace(
            session=f"s{first}", after=first + n - 1 if n else None, pause_s=PAUSE_S if n else 0.0
        )
        for n in range(rounds)
    ]


def run(requests: list[PlannedRequest], task_s: float) -> SimulationResult:
    deployment = Deployment("slackline", "a100-llama3-8b")
    return simulate(Traffic(requests, tiers(task_s)), deployment, RunOptions(accounts=True))


def test_rounds_are_judged_by_what_is_left_of_their_task() -> None:
    result = run(session(0, 3), 60.0)
    records = [record for record in result.records if record is not None]
    assert [record.task.number for record in records if record.task] == [1, 2, 3]
    assert {record.task.due_unix_s for record in records if record.task} == {60.0}
    for record in records:
        assert record.judged_slo.ttlt_s == pytest.approx(60.0 - record.arrived_unix_s)
        assert record.verdict is not None and record.verdict.slo_met


def test_a_task_is_late_from_the_round_on_that_was_late() -> None:
    """Two rounds and their pause fit into the deadline, the third does not."""
    alone_s = run(session(0, 1), 60.0).verdicts[0]
    assert alone_s is not None and alone_s.ttlt_s is not None
    task_s = 2.5 * alone_s.ttlt_s + 1.5 * PAUSE_S
    result = run(session(0, 3), task_s)
    assert [v.missed for v in result.verdicts if v] == [Missed.NOTHING, Missed.NOTHING, Missed.TTLT]
    trial = Trial(
        deployment=Deployment("slackline", "a100-llama3-8b"),
        tiers=tiers(task_s),
        duration_s=1.0,
        seed=1,
    )
    figures = figures_of(trial, session(0, 3), result)
    assert figures.by_session is not None
    assert (figures.by_session.offered, figures.by_session.violated) == (1, 1)


def test_after_some_tasks_a_first_round_leaves_time_for_those_to_come() -> None:
    requests = [each for n in range(20) for each in session(3 * n, 3, 20.0 * n)]
    result = run(requests, 60.0)
    first, last = result.records[0], result.records[-3]
    assert first is not None and first.slo.ttlt_s == 60.0
    assert last is not None and last.slo.ttlt_s is not None
    assert last.slo.ttlt_s == pytest.approx((60.0 - 2 * PAUSE_S) / math.sqrt(3))
    assert last.judged_slo.ttlt_s == 60.0
