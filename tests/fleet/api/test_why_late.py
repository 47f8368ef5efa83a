"""Tests of a fleet's explanations of why a request was late, given on NATS and in traces."""

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.bus.api import RefusedError
from shared.bus.nats import NatsBus
from shared.request_timeline import Happened
from shared.schemas import (
    EndedRow,
    Explain,
    Explanation,
    FindEnded,
    FoundEnded,
    GenerateRequest,
    Sampling,
)
from tests.fleet.live import HOPELESS, WAIT_S, Delivered, ask, client_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
CLOSE_S = 1e-3


def request(name: str, tokens: int, **more: Any) -> GenerateRequest:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return GenerateRequest(request_id=name, prompt="x" * 200, sampling=sampling, **more)


async def explained(
    bus: NatsBus, name: str, tenant: str = "default", *, whole: bool = True
) -> Explanation:
    subject = subjects.EXPLAIN_ALL if whole else subjects.explain(tenant)
    question = Explain(tenant=tenant, request_id=name)
    return await bus.request(subject, question, Explanation, timeout_s=WAIT_S)


async def listed(
    bus: NatsBus, question: FindEnded, subject: str = subjects.HISTORY_ALL
) -> list[EndedRow]:
    return (await bus.request(subject, question, FoundEnded, timeout_s=WAIT_S)).rows


async def replica_of(bus: NatsBus, name: str, tenant: str) -> str:
    """The replica that has taken the request last, as soon as its timeline names one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await explained(bus, name, tenant)
            if held := [step.replica for step in found.happenings if step.what is Happened.HELD]:
                return held[-1]
            await asyncio.sleep(0.02)


@dataclass
class Told:
    """Requests of a fleet, its explanations by request id, and the spans that it wrote."""

    straight: Delivered
    relegated: Delivered
    moved: list[Delivered]
    found: dict[str, Explanation] = field(default_factory=dict)
    seen_by_tenant: Explanation | None = None
    later: dict[str, Explanation] = field(default_factory=dict)  # once its record was gone
    of_traces: dict[str, list[EndedRow]] = field(default_factory=dict)
    of_minutes: dict[str, list[EndedRow]] = field(default_factory=dict)
    of_others: dict[str, list[EndedRow]] = field(default_factory=dict)
    unknown: str = ""
    spans: list[dict[str, Any]] = field(default_factory=list)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def told(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Told]:
    folder = tmp_path_factory.mktemp("why-late")
    spans = folder / "spans.jsonl"
    spec = FleetSpec(
        pace=0.5,
        store=folder / "fleet",
        drain_s=2.0,
        environment={"SLACKLINE_TRACE_FILE": str(spans)},
    )
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        straight = await ask(client, request("straight", 20), "interactive")
        relegated = await ask(client, request("relegated", 20, slo=HOPELESS))
        names = {f"long-{n}": tenant for n, tenant in enumerate(["default", "acme"] * 4)}
        async with asyncio.TaskGroup() as tasks:
            long = [
                tasks.create_task(ask(client, request(name, 400, tenant=tenant)))
                for name, tenant in names.items()
            ]
            await wire.until_speaking(2 + len(long))
            held = await asyncio.gather(
                *(replica_of(bus, name, tenant) for name, tenant in names.items())
            )
            fleet.process("worker-r1").kill()
            async with asyncio.timeout(WAIT_S):
                await wire.replaced.wait()
        delivered = [task.result() for task in long]
        moved = [one for one, replica in zip(delivered, held, strict=True) if replica == "r1"]
        told = Told(straight, relegated, moved)
        for one in (straight, relegated, *moved):
            name, tenant = one.request.request_id, one.request.tenant or "default"
            told.found[name] = await explained(bus, name, tenant)
        told.seen_by_tenant = await explained(bus, "relegated", whole=False)
        with pytest.raises(RefusedError) as refused:
            await explained(bus, "nobody")
        told.unknown = refused.value.refused.code
        # as five minutes later
        for one in (straight, relegated, *moved):
            name, tenant = one.request.request_id, one.request.tenant or "default"
            await bus.requests.delete(f"s.{tenant}.{name}")
            told.later[name] = await explained(bus, name, tenant)
            trace_id = told.found[name].trace_id
            told.of_traces[name] = await listed(bus, FindEnded(trace_id=trace_id))
            minute_unix_s = told.found[name].arrived_unix_s
            question = FindEnded(tenant=tenant, minute_unix_s=minute_unix_s)
            told.of_minutes[name] = await listed(bus, question)
            own = FindEnded(trace_id=trace_id)
            told.of_others[name] = await listed(bus, own, subjects.history("stranger"))
    told.spans = [json.loads(line) for line in spans.read_text().splitlines()]
    yield told


async def test_the_shares_of_the_causes_add_up_to_the_whole_life(told: Told) -> None:
    assert told.moved, "no request was on the worker that was killed"
    for one in (told.straight, told.relegated, *told.moved):
        found, verdict = told.found[one.request.request_id], one.verdict
        assert verdict is not None and found.verdict == verdict
        life_s = verdict.ended_unix_s - found.arrived_unix_s
        assert sum(share.seconds for share in found.shares) == pytest.approx(life_s, abs=CLOSE_S)
        assert sum(share.share for share in found.shares) == pytest.approx(1.0)
        assert all(share.seconds > 0.0 for share in found.shares)


async def test_a_late_request_names_its_first_missed_deadline_and_why(told: Told) -> None:
    found = told.found["relegated"]
    missed = found.first_missed
    assert missed is not None and missed.token == 1
    assert missed.came_s is not None and found.ttft_s == pytest.approx(missed.came_s)
    assert missed.due_s == pytest.approx(HOPELESS.ttft_s, abs=1e-6)
    until_s = sum(share.seconds for share in found.shares_until_missed)
    assert until_s == pytest.approx(missed.came_s, abs=CLOSE_S)
    told_late = r"late by \d.* m?s: its first token was due at 0 ms and came at \d.* m?s; "
    assert re.match(told_late, found.answer), found.answer
    assert found.verdict is not None and found.verdict.first_missed == missed
    assert told.found["straight"].first_missed is None or not told.straight.verdict.slo_met


async def test_the_steps_of_a_request_are_told_in_their_order(told: Told) -> None:
    def steps(name: str) -> list[Happened]:
        return [step.what for step in told.found[name].happenings]

    first = [Happened.HELD, Happened.BEGAN, Happened.FIRST_TOKEN]
    assert steps("straight")[:3] == first
    relegated = told.found["relegated"]
    assert Happened.RELEGATED in steps("relegated")
    assert next(h for h in relegated.happenings if h.what is Happened.RELEGATED).why
    for one in told.moved:
        name = one.request.request_id
        # an attempt that was declined was an attempt
        assert 2 <= steps(name).count(Happened.HELD) <= one.verdict.attempts
        left = [h for h in told.found[name].happenings if h.what is Happened.LEFT]
        assert ("r1", "lost") in [(h.replica, h.why) for h in left]
        causes = {share.cause for share in told.found[name].shares}
        assert "moving" in causes and "decodes" in causes


async def test_the_history_tells_the_same_once_the_record_is_gone(told: Told) -> None:
    assert told.moved and told.later == told.found


async def test_ended_requests_are_found_by_trace_and_by_minute_the_latest_first(told: Told) -> None:
    for name, found in told.found.items():
        [row] = told.of_traces[name]
        assert (row.tenant, row.request_id) == (found.tenant, name)
        assert row.first_missed == found.first_missed
        assert row in told.of_minutes[name]
        assert {other.tenant for other in told.of_minutes[name]} == {found.tenant}
        late = [other.first_missed is not None for other in told.of_minutes[name]]
        assert late == sorted(late, reverse=True)
        assert told.of_others[name] == []


async def test_an_unknown_request_is_a_clear_error(told: Told) -> None:
    assert told.unknown == "not_found"


async def test_a_tenant_reads_of_others_only_that_they_are_others(told: Told) -> None:
    assert told.seen_by_tenant is not None
    named = {n.tenant for n in told.seen_by_tenant.neighbours}
    for step in told.seen_by_tenant.happenings:
        named |= {n.tenant for n in step.neighbours}
    assert named <= {"", "default"}


async def test_the_spans_below_request_leave_no_hole(told: Told) -> None:
    below = defaultdict(list)
    for span in told.spans:
        below[span["parent_span_id"]].append(span)
    for one in (told.straight, told.relegated, *told.moved):
        root = root_of(told, one)
        phases = sorted(
            (span for span in below[root["span_id"]] if span["name"] != "iteration"),
            key=lambda span: span["start_unix_s"],
        )
        covered = root["start_unix_s"]
        for span in phases:
            assert span["start_unix_s"] <= covered + 1e-6, (one.request.request_id, span["name"])
            covered = max(covered, span["end_unix_s"])
        assert covered >= root["end_unix_s"] - 1e-6
        names = {span["name"] for span in phases}
        assert {"admit", "place", "queue", "iterations"} <= names
        assert one.verdict is not None
        # a busy machine may relegate those that moved, too
        assert ("relegated" in names) <= one.verdict.relegated
        assert "relegated" in names or one is not told.relegated
        assert ("moving" in names) == (one in told.moved)


def root_of(told: Told, one: Delivered) -> dict[str, Any]:
    key = f"{one.request.tenant or 'default'}.{one.request.request_id}"
    [root] = [
        span
        for span in told.spans
        if span["name"] == "request" and span["attributes"]["slackline.request.key"] == key
    ]
    return root


async def test_request_is_the_root_and_says_what_was_promised_what_came_and_why(told: Told) -> None:
    for one in (told.straight, told.relegated, *told.moved):
        root, verdict = root_of(told, one), one.verdict
        assert root["parent_span_id"] is None
        said = root["attributes"]
        assert verdict is not None
        assert said["slackline.ttft_s"] == pytest.approx(verdict.ttft_s)
        assert said["slackline.ttlt_s"] == pytest.approx(verdict.ttlt_s)
        assert said["slackline.worst_tbt_s"] == pytest.approx(verdict.worst_tbt_s)
        assert "slackline.slo.ttft_s" in said
        assert ("slackline.missed.cause" in said) == (verdict.first_missed is not None)
        assert root["trace_id"] == told.found[one.request.request_id].trace_id
        events = [event["name"] for event in root["events"]]
        assert "first_token" in events
        assert ("moved" in events) == (one in told.moved)
    [relegated] = [
        event for event in root_of(told, told.relegated)["events"] if event["name"] == "relegated"
    ][:1]
    assert relegated["attributes"]["slackline.reason"]


async def test_sampled_iterations_are_linked_to_the_trace_of_their_plan(told: Told) -> None:
    plans = {(s["trace_id"], s["span_id"]) for s in told.spans if s["name"] == "plan"}
    roots = {s["span_id"] for s in told.spans if s["name"] == "request"}
    iterations = [s for s in told.spans if s["name"] == "iteration" and s["links"]]
    assert iterations
    for span in iterations:
        [link] = span["links"]
        assert link["trace_id"] != span["trace_id"]
        said = span["attributes"]
        assert said["slackline.iteration.batch"] >= 1
        assert said["slackline.iteration.chunk"] >= 1
        assert said["slackline.iteration.predicted_s"] > 0.0
        assert said["slackline.iteration.measured_s"] > 0.0
    linked = [
        s for s in iterations if (s["links"][0]["trace_id"], s["links"][0]["span_id"]) in plans
    ]
    assert linked, "no link leads to a plan"
    assert any(s["parent_span_id"] in roots for s in iterations)
