"""Does one fault to a fleet under load, checks the fleet, and tells what clients saw of it."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.fleet.ports import HOST, free_port
from tests.chaos.balance import balance
from tests.chaos.brokers import three_brokers
from tests.chaos.faults import Act, Arena
from tests.chaos.lines import Lines
from tests.fleet.live import Delivered, client_of, draw_requests, under_load
from tests.fleet.processes import children_of
from tests.infra.full_disk import Disk

SPEC = FleetSpec(
    pace=0.5, drain_s=2.0, gateway=False, environment={"SLACKLINE_WORKER_PREFIX_CACHING": "true"}
)
BEGINNING = "Many requests begin alike. " * 20
SECTIONS = ("ADMISSION", "PLANNER", "RELEGATION", "WORKER")
REPLICAS = ("r1", "r2")
PROMPT, OUTPUT = (5, 400), (60, 200)  # tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one fault. Times are in seconds, as clients saw them."""

    fault: str
    seed: int
    requests: int
    silence_s: float  # the longest between two tokens of one stream
    first_s: float  # the longest until a first token, of requests whose SLO can be held
    # from the fault to the arrival of the last request that missed its SLO; None: none missed it
    normal_s: float | None
    missed: int  # of those whose SLO can be held
    judged: int
    moved: int  # requests with more than one attempt that gave tokens or was lost
    settled_s: float  # from the end of the last stream until the books balanced


@contextlib.asynccontextmanager
async def on_one_broker(folder: Path, disk: Disk | None = None) -> AsyncIterator[Arena]:
    port, others = free_port(), frozenset(children_of(os.getpid()))
    async with Lines() as lines:
        line = await lines.add(port)
        urls = {f"SLACKLINE_{section}_URL": f"nats://{HOST}:{line}" for section in SECTIONS}
        spec = replace(SPEC, store=folder, port=port, environment=urls)
        async with Fleet(spec) as fleet:
            yield Arena(fleet, lines, (), disk, others)


@contextlib.asynccontextmanager
async def on_three_brokers(folder: Path) -> AsyncIterator[Arena]:
    others = frozenset(children_of(os.getpid()))
    async with Lines() as lines, three_brokers(folder, lines, REPLICAS) as (url, brokers):
        spec = replace(SPEC, store=folder / "fleet", url=url)
        async with Fleet(spec) as fleet:
            yield Arena(fleet, lines, brokers, others=others)


async def endure(
    arena: Arena, name: str, act: Act, seed: int, *, n: int, during_s: float, out: Path
) -> Outcome:
    """Do the fault half-way through a load, wait until all have ended, and check the fleet.

    Writes the timeline to `out`, also where a check fails. Raises AssertionError.
    """
    requests = draw_requests(seed, n, prompt=PROMPT, output=OUTPUT, beginning=BEGINNING)
    arena.known |= {request.request_id for request, _ in requests}
    now_s = asyncio.get_running_loop().time
    began_s, told = now_s(), {child.name: len(child.output()) for child in arena.fleet.processes}
    story: list[tuple[float, str]] = []
    delivered: list[Delivered] = []

    async def disturb() -> None:
        story.append((now_s(), name))
        await act(arena)
        story.append((now_s(), "it is over"))

    try:
        async with client_of(arena.fleet) as (bus, client, wire):
            delivered = await under_load(client, requests, during_s, disturb)
            story.append((now_s(), "every stream has ended"))
            await balance(arena, bus, wire, delivered)
            story.append((now_s(), "the books balance"))
    except BaseException as error:
        story.append((now_s(), f"broken: {error!r}"))
        raise
    finally:
        logs = {c.name: _events(c.output()[told[c.name] :]) for c in arena.fleet.processes}
        _write(out, name, seed, {
            "requests": n,
            "during_s": during_s,
            "story": [(round(at_s - began_s, 3), what) for at_s, what in story],
            "streams": [_stream(one, began_s) for one in delivered],
            "logs": logs,
        })  # fmt: skip
    return _judge(name, seed, delivered, story[0][0], settled_s=story[-1][0] - story[-2][0])


def _write(out: Path, name: str, seed: int, told: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name.replace(' ', '-')}-{seed}.json"
    path.write_text(json.dumps({"fault": name, "seed": seed, **told}, indent=1))


def _judge(
    name: str, seed: int, delivered: Sequence[Delivered], fault_s: float, settled_s: float
) -> Outcome:
    judged = [one for one in delivered if one.request.slo is None]
    missed = [one for one in judged if one.verdict is None or not one.verdict.slo_met]
    after = [one.sent_s - fault_s for one in missed if one.heard_s[-1] > fault_s]
    return Outcome(
        fault=name,
        seed=seed,
        requests=len(delivered),
        silence_s=max(b - a for one in delivered for a, b in pairwise(one.heard_s)),
        first_s=max(one.heard_s[0] - one.sent_s for one in judged),
        normal_s=max(0.0, *after) if after else None,
        missed=len(missed),
        judged=len(judged),
        moved=sum(one.verdict is not None and one.verdict.attempts > 1 for one in judged),
        settled_s=settled_s,
    )


def _stream(one: Delivered, began_s: float) -> dict[str, Any]:
    gaps = [(b - a, a - began_s) for a, b in pairwise(one.heard_s)]
    return {
        "request": one.request.request_id,
        "sent_s": round(one.sent_s - began_s, 3),
        "first_s": round(one.heard_s[0] - one.sent_s, 3),
        "ended_s": round(one.heard_s[-1] - began_s, 3),
        "silence_s, from_s": [round(value, 3) for value in max(gaps, default=(0.0, 0.0))],
        "slo_met": one.verdict is not None and one.verdict.slo_met,
        "attempts": None if one.verdict is None else one.verdict.attempts,
    }


def _events(output: str) -> list[str]:
    """The lines of a log that are not about single requests."""
    return [line for line in output.splitlines() if '"request.finished"' not in line]
