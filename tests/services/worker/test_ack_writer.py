"""Tests of a worker whose ack log does not answer: it sends heartbeats, and can still stop."""

import asyncio
import itertools
from collections.abc import Sequence
from random import Random

import pytest

from services.worker import service as worker
from services.worker.ack_writer import AckWriter, FencedError
from services.worker.config import WorkerConfig
from services.worker.engines.make import sim_facts
from services.worker.engines.sim.engine import SimEngine
from services.worker.step_runner import StepRunner
from shared import subjects
from shared.bus.api import Call
from shared.errors import BusTimeout, StoreFull
from shared.perf import profile_file as profiles
from shared.schemas import Announce, Snapshot
from shared.store.acklog import decode_entry
from shared.store.records import Records, Stored
from shared.telemetry.telemetry import Tracing
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import ReplicaId
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

NO_STORE = Faults(store_lost=1.0)


class Serving:
    """A worker on a simulated bus, and the instants of its heartbeats."""

    def __init__(self) -> None:
        self.net, self.stop = SimNet(Random(1), Faults()), asyncio.Event()
        self.heard_s: list[float] = []

    async def begin(self) -> None:
        def on_announce(_: Announce, __: Call) -> None:
            self.heard_s.append(self.net.loop.time())

        net, tokenizer, cfg = self.net, Tokenizer.builtin(), WorkerConfig()
        facts = sim_facts(cfg, tokenizer)
        engine = SimEngine(facts, profiles.load(facts.profile), wait=None, clock=net.loop.time)
        await net.connect("admission").subscribe(subjects.ANNOUNCEMENTS, Announce, on_announce)
        self.task = asyncio.create_task(
            worker.serve(
                cfg,
                net.connect("worker"),
                net.clock,
                VirtualRunner(StepRunner(engine, tokenizer)),
                self.stop,
                tracing=Tracing(),
                rng=Random(2),
            )
        )

    async def end(self) -> None:
        self.stop.set()
        async with asyncio.timeout(30.0):
            await self.task


@virtual()
async def test_a_worker_whose_log_does_not_answer_yet_waits_for_it() -> None:
    """It does not end: its engine may have taken minutes to load."""
    serving = Serving()
    serving.net.faults = NO_STORE
    await serving.begin()
    await asyncio.sleep(10.0)
    serving.net.faults = Faults()
    await asyncio.sleep(10.0)
    await serving.end()
    assert serving.heard_s[0] > 10.0


@virtual()
async def test_a_worker_whose_log_takes_no_writes_yet_obeys_all_the_same() -> None:
    serving = Serving()
    serving.net.fill(1000.0)
    await serving.begin()
    await asyncio.sleep(10.0)
    await serving.end()
    assert not serving.heard_s


@virtual()
async def test_a_worker_whose_log_does_not_answer_goes_on_announcing_itself() -> None:
    serving = Serving()
    await serving.begin()
    await asyncio.sleep(5.0)
    serving.net.faults = NO_STORE
    await asyncio.sleep(20.0)
    serving.net.faults = Faults()
    await serving.end()
    assert serving.heard_s[-1] > 24.0
    gaps_s = [after - before for before, after in itertools.pairwise(serving.heard_s)]
    assert max(gaps_s) < 2.0  # admission takes a worker to be lost after three


class Behind:
    """Two lives (incarnations) of a worker write one log. Reads are answered by a server that may
    be behind the leader, which decides on writes.
    """

    def __init__(self) -> None:
        self.net = SimNet(Random(1), Faults())
        self._last, self._append = self.net.acks.last, self.net.acks.append
        self._seen: tuple[int, bytes] | None = None
        self.reads_behind = 0  # so many more reads show what the server has seen
        self.unanswered: list[bool] = []  # of the next appends: whether it is stored
        self.net.acks.last = self._read  # type: ignore[method-assign]
        self.net.acks.append = self._write  # type: ignore[method-assign]

    def fall_behind(self, reads: int) -> None:
        self._seen, self.reads_behind = self._last(LOG), reads

    def _read(self, subject: str) -> tuple[int, bytes] | None:
        if self.reads_behind:
            self.reads_behind -= 1
            return self._seen
        return self._last(subject)

    def _write(self, subject: str, payload: bytes, expected_last: int) -> int:
        if self.unanswered:
            if self.unanswered.pop(0):
                self._append(subject, payload, expected_last)
            raise BusTimeout("no answer")
        return self._append(subject, payload, expected_last)

    def writer(self, incarnation: str) -> AckWriter:
        bus = self.net.connect(incarnation)
        records = Records(bus.requests, bus.bodies)
        return AckWriter(bus, ReplicaId("r1"), incarnation, records, limit=4)

    def written(self) -> list[str]:
        """The incarnation of each entry."""
        return [decode_entry(payload).incarnation for _, payload in self.net.acks.read(LOG, 0)]


LOG = subjects.ack_log(ReplicaId("r1"))


@pytest.mark.parametrize("stored", [False, True])
@virtual()
async def test_a_server_that_is_behind_does_not_fence_a_writer_whose_append_was_unanswered(
    stored: bool,
) -> None:
    behind = Behind()
    one = behind.writer("a")
    behind.fall_behind(reads=0)
    await one.register()
    behind.reads_behind, behind.unanswered = 3, [stored]
    async with asyncio.timeout(60.0):
        await one._append(Snapshot(incarnation="a", entries=[], overs=[]))
    assert not one.waits
    assert not await one.fenced()
    assert behind.written() == ["a", "a"]


@virtual()
async def test_a_writer_registers_also_where_the_server_is_behind() -> None:
    behind = Behind()
    behind.fall_behind(reads=0)
    await behind.writer("a").register()
    behind.reads_behind = 5
    async with asyncio.timeout(60.0):
        await behind.writer("b").register()
    assert behind.written() == ["a", "b"]


@pytest.mark.parametrize("unanswered", [[], [False], [False, False]])
@virtual()
async def test_a_writer_that_is_fenced_notices_although_the_server_is_behind(
    unanswered: list[bool],
) -> None:
    behind = Behind()
    one = behind.writer("a")
    await one.register()
    behind.fall_behind(reads=0)
    await behind.writer("b").register()
    behind.reads_behind, behind.unanswered = 3, unanswered
    async with asyncio.timeout(60.0):
        with pytest.raises(FencedError):
            await one._append(Snapshot(incarnation="a", entries=[], overs=[]))
    assert not behind.reads_behind
    assert await one.fenced()
    assert behind.written() == ["a", "b"]


@virtual()
async def test_a_full_log_is_trimmed_once_no_request_needs_its_older_entries() -> None:
    """Its writer could not trim it before. A snapshot comes after an ack, which had no room."""
    behind = Behind()
    append, needed = behind.net.acks.append, True

    def bounded(subject: str, payload: bytes, expected_last: int) -> int:
        if len(behind.net.acks.read(LOG, 0)) >= 4:
            raise StoreFull("the log is full")
        return append(subject, payload, expected_last)

    behind.net.acks.append = bounded  # type: ignore[method-assign]
    await behind.writer("a").register()
    one = behind.writer("b")
    opened = one._records.open

    async def of_an_earlier_life() -> Sequence[Stored]:
        if needed:
            raise BusTimeout("no answer")  # who knows
        return await opened()

    one._records.open = of_an_earlier_life  # type: ignore[method-assign]
    await one.register()
    page = Snapshot(incarnation="b", entries=[], overs=[])
    await one._snapshot([page, page])
    waiting = asyncio.create_task(one._append(page))
    await asyncio.sleep(30.0)
    assert one.waits and not waiting.done()
    needed = False
    async with asyncio.timeout(30.0):
        await waiting
    assert behind.written() == ["b", "b", "b"]
