"""Tests of live fleets in which the requests of a session have one deadline together."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.bus.api import RefusedError
from shared.bus.nats import NatsBus
from shared.client.client import Client
from shared.schemas import Explain, Explanation, Record, Verdict
from shared.store.records import Records
from shared.vocabulary import Missed, Slo
from tests.fleet.live import WAIT_S, ask, client_of, request_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
TASK = Slo(task_ttlt_s=600.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(FleetSpec(replicas=1, pace=0.2, drain_s=2.0)) as fleet:
        yield fleet


async def round_of(
    bus: NatsBus, client: Client, name: str, session: str, slo: Slo = TASK, **more: Any
) -> tuple[Record, Verdict]:
    """A request from its start to its end, and its record."""
    asked = request_for(8, name, session=session, slo=slo, application="agent", **more)
    verdict = (await ask(client, asked)).verdict
    stored = await Records(bus.requests, bus.bodies).get(subjects.request_key("default", name))
    assert stored is not None and verdict is not None
    return stored.record, verdict


async def test_rounds_share_a_deadline_that_a_killed_admission_does_not_lose(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, _), asyncio.timeout(WAIT_S):
        first, _ = await round_of(bus, client, "one", "s1")
        assert first.task is not None and first.task.number == 1
        assert first.task.due_unix_s == first.arrived_unix_s + 600.0
        assert first.slo.ttlt_s == pytest.approx(600.0), "nothing is known of rounds to come"
        fleet.process("admission").kill()
        second, verdict = await round_of(bus, client, "two", "s1")
        assert second.task is not None and second.task.number == 2
        assert second.task.due_unix_s == first.task.due_unix_s
        # what the first round did not use is there for the second
        left_s = second.task.due_unix_s - second.arrived_unix_s
        assert second.slo.ttlt_s == pytest.approx(left_s)
        assert verdict.slo_met and verdict.task_left_s is not None
        assert verdict.task_left_s == second.task.due_unix_s - verdict.ended_unix_s < left_s
        together = await asyncio.gather(*(round_of(bus, client, f"c{n}", "s1") for n in range(4)))
        assert [record.task.number for record, _ in together if record.task] == [3] * 4
        told = await bus.request(
            subjects.explain("default"), Explain(request_id="two"), Explanation, timeout_s=10.0
        )
        assert "; round 2 of a task that has " in told.answer
        assert told.task == second.task


async def test_http_names_the_task_by_a_header_and_its_session_by_user(fleet: Fleet) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "ignore_eos": True, "user": "s2"}
    headers = {"x-slackline-slo-task-ttlt-ms": "600000", "x-slackline-verdict": "true"}
    left_s = []
    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S) as http:
        for _ in range(2):
            answer = await http.post("/v1/completions", json=body, headers=headers)
            (verdict,) = answer.json()["verdicts"]
            assert verdict["slo_met"]
            left_s.append(verdict["task_left_s"])
    assert 600.0 > left_s[0] > left_s[1]


async def test_a_round_of_a_task_that_is_late_is_told_so_and_finishes(fleet: Fleet) -> None:
    """A whole answer, best-effort; or none, where the caller asked never to be served late."""
    short = Slo(task_ttlt_s=0.001)
    async with client_of(fleet) as (bus, client, _), asyncio.timeout(WAIT_S):
        await round_of(bus, client, "late-1", "s3", short)
        record, verdict = await round_of(bus, client, "late-2", "s3", short)
        assert record.task is not None and record.task.number == 2
        assert verdict.output_tokens == 8 and verdict.relegated
        assert verdict.missed is Missed.TTLT
        assert verdict.task_left_s is not None and verdict.task_left_s < 0
        with pytest.raises(RefusedError, match="the task's deadline has passed"):
            await round_of(bus, client, "late-3", "s3", short, allow_relegation=False)
