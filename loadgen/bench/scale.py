"""Measures what one process of a service carries as replicas grow: planners with the replicas of a
stand-in, an admission and a gateway that hear of replicas, and admissions that sweep records.

Each service is a process of its own on a real NATS server; a stand-in in this process plays the
rest of the fleet. Beside each rate stands the CPU time of one unit, which other work on the machine
hardly changes. Its inverse is the rate of a core that does nothing else.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple
from uuid import uuid4

import httpx
from msgspec.structs import replace

from loadgen.bench.figure import Figure
from loadgen.bench.machine import cpu_s
from loadgen.bench.stand_in import KV_BLOCKS, announcement, offer
from loadgen.bench.stand_in_replicas import ITERATION_S, StandInReplicas
from loadgen.fleet.child import Child, Say
from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.fleet.nats_server import NatsServer
from loadgen.fleet.ports import HOST, free_port
from shared import subjects
from shared.bus.nats import NatsBus, connect
from shared.client.client import Client
from shared.clock import Clock
from shared.core.admission.admission import AdmissionCore, Heard, Told
from shared.prefix import chain_of, prefix_of
from shared.process.chores import Chores
from shared.routing.routings import named
from shared.schemas import Body, Digest, GenerateRequest, Prefixes, Record, Sampling
from shared.store.records import Records
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass, Slo

SETTLE_S = 2.0
POLL_S = 0.02
HEARTBEAT_S, DIGEST_S = 0.5, 0.1
SWEEP_S = 2.0  # shorter than usual, so that several fall into the time of a measurement
READY = {"admission": '"door.open"', "gateway": '"service.ready"'}
PROFILE, TOKENS = "a100-llama3-8b", 100
PROMPT, PLACEMENTS = 4096, 50
WORDS = {
    "in_msgs": "messages to NATS",
    "in_bytes": "bytes to NATS",
    "out_msgs": "messages from NATS",
    "out_bytes": "bytes from NATS",
}


class Effort(NamedTuple):
    """The sizes of the part. `stretch`: seconds of the wall clock for a second of an engine."""

    measure_s: float
    planners: tuple[tuple[int, int], ...]  # planners, replicas
    stretch: float
    heard: tuple[tuple[str, int], ...]  # a service, and the replicas that it hears of
    records: int  # that a sweep reads
    sweepers: tuple[int, ...]  # admissions
    requests: int


WHOLE = Effort(
    measure_s=8.0,
    planners=((1, 64), (1, 256), (2, 256), (4, 256)),
    stretch=10.0,
    heard=(("admission", 256), ("admission", 1000), ("gateway", 256), ("gateway", 1000)),
    records=10_000,
    sweepers=(1, 3),
    requests=100,
)
QUICK = Effort(
    measure_s=1.0,
    planners=((1, 8), (2, 8)),
    stretch=10.0,
    heard=(("admission", 16), ("gateway", 16)),
    records=100,
    sweepers=(2,),
    requests=4,
)


async def measure(effort: Effort, seed: int, say: Say) -> list[Figure]:
    figures: list[Figure] = []
    for planners, replicas in effort.planners:
        figures += await _planned(planners, replicas, effort, Random(seed), say)
    for service, replicas in effort.heard:
        figures += await _heard(service, replicas, effort, say)
        if service == "admission":
            figures += _placed(replicas, Random(seed))
    figures += await _listed(effort.records, say)
    for admissions in effort.sweepers:
        figures += await _swept(admissions, effort, say)
    return [*figures, *await _requests(effort.requests, say)]


async def _planned(
    planners: int, replicas: int, effort: Effort, rng: Random, say: Say
) -> list[Figure]:
    """Replicas of a stand-in, whose engines decode 64 requests each, under so many planners."""
    clock = Clock()
    environment = {"SLACKLINE_PLANNER_MAX_REPLICAS": str(-(-replicas // planners))}
    running = _services("planner", planners, '"planner.ready"', environment, say)
    async with running as (bus, services, varz), Chores() as chores:
        beside = StandInReplicas(replicas, effort.stretch, bus, clock, rng, chores)
        await beside.start()
        await asyncio.sleep(SETTLE_S)
        beside.reset()
        began_unix_s, began_cpu_s, before = clock.unix_s(), _cpu_s(services), varz()
        await asyncio.sleep(effort.measure_s)
        iterations, took_s = beside.iterations, clock.unix_s() - began_unix_s
        used_s, after = _cpu_s(services) - began_cpu_s, varz()
        beside.stop()
    message_s = _grown("cpu_s", before, after) / _grown("in_msgs", before, after)
    say(f"  {planners} x planner, {replicas} replicas: {iterations / took_s:,.0f} iterations/s")
    part, each_s = f"{planners} planners, {replicas} replicas", used_s / max(iterations, 1)
    note = f"engines {effort.stretch:g} times as slow; {used_s / took_s:.2f} cores of planners"
    return [
        Figure(part, "iterations planned", iterations / took_s, "/s", note=note),
        Figure(part, "CPU of an iteration", each_s, "us"),
        Figure(part, "replicas of a core at 25 ms an iteration", ITERATION_S / each_s, ""),
        Figure(part, "CPU of NATS for a message", message_s, "us"),
        Figure(part, "messages an iteration", _grown("in_msgs", before, after) / iterations, ""),
        Figure(part, "bytes an iteration", _grown("in_bytes", before, after) / iterations, ""),
    ]


def _grown(name: str, before: dict[str, float], after: dict[str, float]) -> float:
    return after[name] - before[name]


async def _heard(service: str, replicas: int, effort: Effort, say: Say) -> list[Figure]:
    """An admission or a gateway without requests, beside so many replicas that are told of."""
    clock, heard = Clock(), 0
    names = [ReplicaId(f"r{n}") for n in range(replicas)]

    async def beat(bus: NatsBus) -> None:
        nonlocal heard
        loop, number = asyncio.get_running_loop(), 0
        next_s = loop.time()
        while True:
            now_unix_s = clock.unix_s()
            for name in names:
                if number % round(HEARTBEAT_S / DIGEST_S) == 0:
                    announced = announcement(name, PROFILE, now_unix_s)
                    await bus.publish(subjects.announce(name), announced)
                    heard += 1
                heard += 1
                await bus.publish(subjects.digest(name), _digest(name, now_unix_s))
            number += 1
            next_s += DIGEST_S
            await asyncio.sleep(max(0.0, next_s - loop.time()))

    async with _services(service, 1, READY[service], {}, say) as (bus, services, _):
        beating = asyncio.create_task(beat(bus))
        await asyncio.sleep(SETTLE_S)
        began_s, before = _cpu_s(services), heard
        await asyncio.sleep(effort.measure_s)
        used_s, messages = _cpu_s(services) - began_s, heard - before
        beating.cancel()
    rate = messages / effort.measure_s
    say(f"  {service}, {replicas} replicas: {rate:,.0f} digests and heartbeats a second")
    part = f"{service} beside {replicas} replicas"
    return [
        Figure(part, "digests and heartbeats", rate, "/s"),
        Figure(part, "CPU for each", used_s / messages if messages else None, "us"),
        Figure(part, "CPU without requests", used_s / effort.measure_s, "%", note="of a core"),
    ]


def _placed(replicas: int, rng: Random) -> list[Figure]:
    """The CPU of an admission's core for the first place of a request of PROMPT tokens: nobody, and
    each replica, has its prefix.
    """
    core, now_unix_s = AdmissionCore(named("in_time"), rng), 1.0
    chain = chain_of(range(PROMPT))
    offered = offer(0, Slo(ttft_s=1.0), PROMPT, now_unix_s)
    told = Prefixes(seq=1, kept=prefix_of(chain))
    for n in range(replicas):
        digest = replace(_digest(ReplicaId(f"r{n}"), now_unix_s), prefix_seq=1)
        core.handle(Heard(digest), now_unix_s=now_unix_s)
        core.handle(Told(digest.replica, told), now_unix_s=now_unix_s)
    figures = []
    for what, one in (("nothing", offered), ("all", replace(offered, prefix=told.kept))):
        began_s = time.process_time()
        for _ in range(PLACEMENTS):
            core.pick(one, now_unix_s=now_unix_s)
        used_s = time.process_time() - began_s
        part = f"a placement among {replicas} replicas, of which each keeps {what}"
        figures.append(Figure(part, "CPU for each replica", used_s / PLACEMENTS / replicas, "us"))
    return figures


async def _listed(records: int, say: Say) -> list[Figure]:
    """The CPU of this process while it reads so many open records, as a sweep does."""
    with _server() as (url, _):
        async with connect(url, "slackline-bench") as bus:
            await bus.make_streams([])
            stored = await _fill(bus, records)
            began_s = time.process_time()
            listing = await stored.listing(whole=True)
            used_s = time.process_time() - began_s
    assert len(listing.open) == records
    say(f"  {records} open records: {1e3 * used_s:.0f} ms to read all")
    return [Figure(f"a sweep of {records} records", "CPU of a record", used_s / records, "us")]


async def _fill(bus: NatsBus, records: int) -> Records:
    """Store so many open records, each with a body of its own."""
    stored, now_unix_s = Records(bus.requests, bus.bodies), Clock().unix_s()
    for n in range(records):
        record = _record(n, now_unix_s)
        record = replace(record, body_key=stored.body_key(record.key))
        await stored.create(record, Body(prompt=bytes(4000), sampling=Sampling()))
    return stored


async def _swept(admissions: int, effort: Effort, say: Say) -> list[Figure]:
    """The CPU of all admissions for the sweeps of the records that are open in their fleet."""
    environment = {"SLACKLINE_ADMISSION_SWEEP_S": str(SWEEP_S)}
    async with _services("admission", admissions, READY["admission"], environment, say) as running:
        bus, services, _ = running
        await asyncio.sleep(SETTLE_S)
        idle_s = await _used_s(services, effort.measure_s)
        await _fill(bus, effort.records)
        await asyncio.sleep(SETTLE_S)
        used_s = await _used_s(services, effort.measure_s) - idle_s
    each_s = used_s / (effort.measure_s / SWEEP_S)
    say(f"  {admissions} x admission, {effort.records} open records: {1e3 * each_s:.0f} ms a sweep")
    part = f"{admissions} admissions, {effort.records} open records"
    return [Figure(part, "CPU of all for a record, each sweep_s", each_s / effort.records, "us")]


async def _used_s(services: Sequence[Child], for_s: float) -> float:
    before_s = _cpu_s(services)
    await asyncio.sleep(for_s)
    return _cpu_s(services) - before_s


async def _requests(requests: int, say: Say) -> list[Figure]:
    """A fleet of two sim engines that serves one request of 100 tokens after another."""
    with _server() as (url, varz):
        spec = FleetSpec(url=url, profile=PROFILE, pace=0.2, drain_s=1.0, gateway=False)
        async with (
            Fleet(spec, say) as fleet,
            fleet.connect("bench") as bus,
            Client(bus, Clock()) as client,
        ):
            await asyncio.sleep(SETTLE_S)
            rest = await _over(varz, SETTLE_S)
            before, began_s = varz(), time.monotonic()
            for _ in range(requests):
                await (await client.submit(_request(), "chat")).wait()
            after, took_s = varz(), time.monotonic() - began_s
    part = "a request of 100 tokens on an idle fleet"
    figures = []
    for what, unit in (("in_msgs", ""), ("in_bytes", "B"), ("out_msgs", ""), ("out_bytes", "B")):
        used = after[what] - before[what] - rest[what] * took_s
        figures.append(Figure(part, WORDS[what], used / requests, unit))
    say(f"  {requests} requests: {figures[0].value:.0f} messages each")
    connections = Figure("that fleet", "connections to NATS", float(after["connections"]), "")
    return [*figures, connections]


def _request() -> GenerateRequest:
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    return GenerateRequest(request_id=uuid4().hex, prompt=200 * "x", sampling=sampling)


async def _over(varz: Callable[[], dict[str, float]], for_s: float) -> dict[str, float]:
    """By counter: what it grows by in a second while nothing is asked."""
    before = varz()
    await asyncio.sleep(for_s)
    return {name: (value - before[name]) / for_s for name, value in varz().items()}


@contextmanager
def _server() -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """A NATS server without keys: its URL, and its counters whenever they are asked for."""
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as folder:
        port, include = free_port(), Path(folder) / "monitoring.conf"
        include.write_text(f'http: "{HOST}:{port}"\n')
        server = NatsServer(include=include)

        def varz() -> dict[str, float]:
            told = httpx.get(f"http://{HOST}:{port}/varz", trust_env=False).json()
            used_s = cpu_s(server.pid) if server.pid is not None else None
            return {name: float(told[name]) for name in (*WORDS, "connections")} | {
                "cpu_s": used_s or 0.0
            }

        url = server.start(Path(folder) / "nats")
        try:
            yield url, varz
        finally:
            server.stop()


@asynccontextmanager
async def _services(
    service: str, number: int, ready: str, environment: Mapping[str, str], say: Say
) -> AsyncIterator[tuple[NatsBus, list[Child], Callable[[], dict[str, float]]]]:
    """A NATS server, a connection to it, its counters, and so many processes of the service.

    The processes are killed at the end: what is under way is of no interest.
    """
    keepers = list[asyncio.Task[None]]()
    with _server() as (url, varz), tempfile.TemporaryDirectory() as folder:
        services = [
            Child(
                f"{service}-{n}",
                [sys.executable, "-m", f"services.{service}"],
                {**os.environ, "SLACKLINE_URL": url, **environment},
                Path(folder) / f"{n}.jsonl",
                say,
            )
            for n in range(number)
        ]
        try:
            async with connect(url, "slackline-bench") as bus:
                await bus.make_streams([])
                for child in services:
                    keepers.append(asyncio.create_task(child.keep(), name=child.name))
                    while ready not in child.output():
                        if keepers[-1].done():
                            keepers[-1].result()
                        await asyncio.sleep(POLL_S)
                    child.patient = True
                yield bus, services, varz
        finally:
            for child in services:
                child.abandon()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)


def _cpu_s(services: Sequence[Child]) -> float:
    """The CPU seconds that they have used since they began."""
    used = [cpu_s(child.pid) for child in services if child.pid is not None]
    return sum(seconds for seconds in used if seconds is not None)


def _digest(replica: ReplicaId, now_unix_s: float) -> Digest:
    """A replica that decodes 64 requests."""
    return Digest(
        replica=replica, incarnation="i1", planner="p1", at_unix_s=now_unix_s, model="m", pool="",
        waiting=0, running=64, best_effort=0, waiting_prefill_tokens=0, backlog_s=0.0,
        kv_blocks=KV_BLOCKS, kv_free_blocks=KV_BLOCKS // 2, free_slots=4032, surplus=True,
    )  # fmt: skip


def _record(number: int, now_unix_s: float) -> Record:
    """A request that waits in the best-effort pool."""
    return Record(
        key=RequestKey(f"bench.{number}"), body_key="", owner="bench", attempt=1,
        state=RecordState.RELEGATED, service_class=ServiceClass.BEST_EFFORT, tier="batch",
        slo=Slo(ttlt_s=3600.0), importance=1.0, application="", session="",
        arrived_unix_s=now_unix_s, expires_unix_s=now_unix_s + 3600.0, prompt_tokens=500,
        max_tokens=200, stream_subject="s",
    )  # fmt: skip
