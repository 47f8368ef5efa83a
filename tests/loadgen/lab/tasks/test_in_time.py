"""Tests of which tasks count as in time, whatever deadlines their rounds had."""

from loadgen.lab.tasks.__main__ import EVEN, PUBLISHED, TASK, Job, in_time, run, tiers_of
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared.vocabulary import Slo
from tests.loadgen import planned


def test_a_task_is_in_time_by_its_last_round_alone() -> None:
    job = Job(load="toolllm", rate_rps=1.0, policy="fcfs", deadlines=EVEN, seed=1)
    tiers = tiers_of(job)
    assert tiers.tiers["agent"].slo == Slo(ttlt_s=20.0 / 2.7)
    requests = [
        planned.one(n, 200, 50, "agent", 0.0)._replace(
            session="s", after=n - 1 if n else None, pause_s=3.0
        )
        for n in range(3)
    ]
    result = simulate(Traffic(requests, tiers), Deployment("fcfs", "a100-llama3-8b"))
    ends = [verdict.ended_unix_s for verdict in result.verdicts if verdict is not None]
    assert in_time(requests, result, ends[2] + 0.001) == [True]
    assert in_time(requests, result, ends[2] - 0.001) == [False]


def test_all_kinds_of_deadlines_get_the_same_tasks() -> None:
    rows = [
        run(
            Job(
                load="toolllm",
                rate_rps=0.5,
                policy="slackline",
                deadlines=deadlines,
                seed=1,
                seconds=10.0,
            )
        )
        for deadlines in (PUBLISHED, EVEN, TASK)
    ]
    assert len({row.tasks for row in rows}) == 1
    assert [row.in_time for row in rows[1:]] == [row.tasks for row in rows[1:]], "nobody waits"
