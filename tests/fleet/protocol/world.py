"""A whole fleet in one process on virtual time: the real services and cores on a simulated bus,
with clients, faults and a final check.

`run(seed)` plays one schedule: it draws a fleet, a load and faults from the seed, plays them, then
calms the network and checks that no request is lost or doubled. A failure prints the seed and the
newest messages.
"""

import asyncio
import functools
import random
from collections.abc import Callable

import msgspec

from services.admission.service import Admission
from services.admission.sweep import ORPHAN_S
from services.admission.tokenizers import Tokenizers
from services.planner.config import PlannerConfig
from services.planner.service import Planner
from services.relegation.config import RelegationConfig
from services.relegation.service import Relegation
from services.worker import service as worker
from services.worker.config import WorkerConfig
from services.worker.engines.sim.engine import SimEngine, readable_token
from services.worker.step_runner import StepRunner
from shared import subjects
from shared.bus.api import RefusedError
from shared.client.client import Client, Handle, Patience
from shared.columns import unpack_list
from shared.core.worker.held_request import seed_of
from shared.errors import BusError
from shared.features import MIN_P
from shared.perf import profile_file as profiles
from shared.perf.draft import DRAFT
from shared.process.fleet_time import FleetTime
from shared.schemas import Delta, End, GenerateRequest, PlanAck, Record, Resume
from shared.store.acklog import decode_entry
from shared.store.seal import opened
from shared.store.usage import DaySum
from shared.telemetry.telemetry import Tracing
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, ReplicaId
from tests import made
from tests.chaos.sabotage.sitecustomize import spoil_acks
from tests.fleet.protocol.known_prefixes import check_prefixes
from tests.fleet.protocol.scene import CALM, Scene, Seen
from tests.simulated.bus import SimNet
from tests.simulated.folding import fold
from tests.simulated.mover import Links, VirtualMover
from tests.simulated.process import SimProcess
from tests.simulated.runner import VirtualRunner
from tests.simulated.virtual_loop import run_virtual

PROFILE = "a100-llama3-8b"
profile = functools.cache(profiles.load)  # every worker of every schedule has the same


class World:
    """A fleet on a simulated bus, its clients, and what each client saw."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene, self.seed = scene, seed
        self.rng = random.Random(seed)
        self.net = SimNet(random.Random(seed + 1), scene.faults, trace_lines=4000)
        self.processes: dict[str, SimProcess] = {}
        self.cores: dict[str, Callable[[], None]] = {}
        self.seen: dict[str, Seen] = {}
        self.handles: dict[str, Handle] = {}
        self.requests: dict[str, GenerateRequest] = {}
        self.cancelled: set[str] = set()
        self.deleted: set[str] = set()  # requests whose record was deleted while it was open
        self.planners: list[Planner] = []
        self.living: dict[str, Planner] = {}  # the newest of each name
        self.engines: dict[str, SimEngine] = {}  # the newest of each replica
        self.links = Links(random.Random(seed + 2), scene.breaks)
        self.found_tokens = 0  # of all prompts, on all replicas, at the end
        self.ignored: set[str] = set()  # keys of records that strangers wrote
        # every entry of every ack log in order, the trimmed ones included
        self.written: list[tuple[str, bytes]] = []
        append = self.net.acks.append

        def remember(subject: str, payload: bytes, expected_last: int) -> int:
            seq = append(subject, payload, expected_last)
            self.written.append((subject, payload))
            return seq

        self.net.acks.append = remember  # type: ignore[method-assign]
        self.down_s = 0.3  # until a dead process is started again

    # ------------------------------------------------------------ processes

    def start(self, name: str) -> None:
        skew_s = self.rng.uniform(-0.003, 0.003)
        if self.scene.skew_s:
            skew_s += self.rng.choice((0.0, 0.0, -1.0, 1.0)) * self.scene.skew_s
        process = SimProcess(name, skew_s=skew_s, on_exit=self._exited)
        self.processes[name] = process
        process.start(self._main(name, process))

    def _exited(self, process: SimProcess) -> None:
        failure = process.failure
        if isinstance(failure, BaseExceptionGroup):
            failure = failure.split(BusError)[1]
        # the bus may fail a start: its supervisor tries again
        if failure is not None and not isinstance(failure, BusError):
            self.net.note("world", f"{process.name} failed: {process.failure!r}")
            raise AssertionError(f"{process.name} failed") from process.failure
        self.net.loop.call_later(self.down_s, self.start, process.name)

    async def _main(self, name: str, process: SimProcess) -> None:
        bus, clock, stop = self.net.connect(name, process), process.clock, asyncio.Event()
        rng = random.Random(self.rng.getrandbits(64))
        kind = name.split("-")[0]
        if self.scene.keeps_time:
            time = FleetTime(bus, clock, kind, f"{name}-{process.clock.skew_s}")
            await time.begin()
            process.spawn(time.keep())
        if kind == "admission":
            service = Admission(self.scene.admission, bus, clock, Tokenizers(), Tracing(), rng)
            self.cores[name] = service.core.check
            await service.run(stop)
        elif kind == "planner":
            planner = Planner(
                PlannerConfig(policy=self.scene.policy, settings=self.scene.settings),
                bus,
                clock,
                Tracing(),
                rng,
            )
            self.cores[name] = lambda: (
                [seat.core.check() for seat in planner._planners.values() if seat.core.synced]
                and None
            )
            self.planners.append(planner)
            self.living[name] = planner
            await planner.run(stop)
        elif kind == "relegation":
            relegation = Relegation(RelegationConfig(list_s=2.0), bus, clock, Tracing(), rng)
            self.cores[name] = lambda: relegation.core.check()
            await relegation.run(stop)
        else:
            settings = {
                "snapshot_acks": self.scene.snapshot_acks,
                "kv_blocks": self.scene.kv_blocks,
                "max_slots": self.scene.max_slots,
            }
            replica = name.split("-")[1]
            cfg_w = WorkerConfig(replica=replica, role=self.scene.role_of(replica), **settings)
            tokenizer = Tokenizer.builtin()
            facts = made.engine_facts(
                model=self.scene.model_of(cfg_w.replica),
                profile=PROFILE,
                kv_blocks=cfg_w.kv_blocks,
                context_tokens=4096,
                max_slots=cfg_w.max_slots,
                vocabulary=tokenizer.vocabulary,
                eos_token_ids=frozenset(tokenizer.eos_token_ids),
            )
            facts = facts._replace(
                draft=DRAFT, features=frozenset({MIN_P} if cfg_w.replica in self.scene.able else ())
            )
            engine = SimEngine(
                facts,
                profile(PROFILE),
                wait=None,
                clock=self.net.loop.time,
                prefix_caching=self.scene.prefixes,
            )
            self.engines[cfg_w.replica] = engine
            mover = None
            if self.scene.roles:
                address = f"{name}:{self.rng.getrandbits(16)}"
                self.links.open(address, engine, lambda: process.alive and not process.paused)
                mover = VirtualMover(self.links, address, engine, process.spawn)
            await worker.serve(
                cfg_w,
                bus,
                clock,
                VirtualRunner(StepRunner(engine, tokenizer)),
                stop,
                tracing=Tracing(),
                rng=rng,
                mover=mover,
            )

    # ------------------------------------------------------------ clients

    async def _client(self, client: Client, request: GenerateRequest, after_s: float) -> None:
        await asyncio.sleep(after_s)
        seen = self.seen[request.request_id]
        try:
            handle = await client.submit(request, "chat")
        except RefusedError as error:
            if error.refused.code not in ("slow_down", "unattainable_slo"):
                raise
            seen.refused = True
            return
        self.handles[request.request_id] = handle
        async for event in handle:
            if isinstance(event, Delta):
                assert event.offset == len(seen.tokens) and event.text_offset == len(seen.text), (
                    "a gap or a repeat reached the client"
                )
                seen.tokens += event.tokens
                seen.text += event.text
            elif isinstance(event, End):
                seen.ends.append(event)

    async def _cancel(self, request_id: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        handle = self.handles.get(request_id)
        if handle is not None:
            self.cancelled.add(request_id)
            await handle.cancel()

    # ------------------------------------------------------------ the schedule

    async def play(self) -> None:
        scene, rng = self.scene, self.rng
        for kind, count in (
            ("admission", scene.admissions),
            ("planner", scene.planners),
            ("relegation", scene.relegations),
        ):
            for n in range(count):
                self.start(f"{kind}-{n}")
        for n in range(scene.replicas):
            self.start(f"worker-r{n}")
        bus = self.net.connect("clients")
        patience = Patience(give_up_s=600.0, submit_s=600.0, silence_s=1.0, silence_limit_s=5.0)
        async with Client(bus, self.net.clock, patience=patience) as client:
            tasks = []
            for n in range(scene.requests):
                request = scene.request(n, rng)
                self.requests[request.request_id] = request
                self.seen[request.request_id] = Seen()
                tasks.append(
                    asyncio.ensure_future(
                        self._client(client, request, 0.5 + rng.random() * scene.over_s)
                    )
                )
            cancels = [
                self._cancel(f"q{rng.randrange(scene.requests)}", 0.5 + rng.random() * scene.over_s)
                for _ in range(scene.cancels)
            ]
            tasks += [asyncio.ensure_future(cancel) for cancel in cancels]
            tasks += [asyncio.ensure_future(step) for step in self._misfortunes()]
            await asyncio.sleep(0.5 + scene.over_s)
            self.net.faults = CALM
            self.net.note("world", "calm")
            done, late = await asyncio.wait(tasks, timeout=scene.settle_s)
            waiting = sorted(
                name for name, seen in self.seen.items() if not seen.ends and not seen.refused
            )
            assert not late, f"{len(late)} clients still wait: {waiting}"
            for task in done:
                task.result()
        await asyncio.sleep(12.0)  # every sweep, listing and lease has had its turn
        async with asyncio.timeout(2 * ORPHAN_S):  # what lost its admission goes later
            while self.net.bodies.scan("", now_s=self.net.loop.time()) or self._orphans():
                await asyncio.sleep(1.0)
        self.reckon()

    def _misfortunes(self) -> list:
        scene, rng = self.scene, self.rng
        names = sorted(self.processes)

        async def kill(at_s: float) -> None:
            await asyncio.sleep(at_s)
            name = rng.choice(names)
            self.net.note("world", f"KILL {name}")
            self.processes[name].kill()

        async def pause(at_s: float) -> None:
            await asyncio.sleep(at_s)
            process = self.processes[rng.choice(names)]
            for_s = rng.choice((0.05, 0.5, 4.0, 8.0))
            self.net.note("world", f"PAUSE {process.name} {for_s}")
            process.pause()
            await asyncio.sleep(for_s)
            process.resume()

        async def restart(at_s: float) -> None:
            await asyncio.sleep(at_s)
            self.net.note("world", "BROKER RESTART")
            self.net.restart_broker(rng.choice((0.05, 1.0, 4.0)))

        async def delete(at_s: float) -> None:
            await asyncio.sleep(at_s)
            now = self.net.loop.time()
            found = [
                msgspec.msgpack.decode(entry.value, type=Record)
                for _, entry in self.net.requests.scan("s.", now_s=now)
            ]
            records = [record for record in found if record.verdict is None]
            if records:
                key = rng.choice(records).key
                self.net.note("world", f"DELETE {key}")
                self.deleted.add(key.partition(".")[2])
                self.net.requests.delete(f"s.{key}", now_s=now)

        async def fill(at_s: float) -> None:
            await asyncio.sleep(at_s)
            self.net.fill(scene.full_s)

        async def jump(at_s: float) -> None:
            await asyncio.sleep(at_s)
            self.net.clock.move(scene.jump_s)
            for name in names[::2]:
                self.processes[name].clock.skew_s += scene.jump_s

        steps = [fill(0.5 + rng.random() * scene.over_s)] if scene.full_s else []
        steps += [jump(0.5 + scene.over_s / 2)] if scene.jump_s else []
        steps += [kill(0.5 + rng.random() * scene.over_s) for _ in range(scene.kills)]
        steps += [pause(0.5 + rng.random() * scene.over_s) for _ in range(scene.pauses)]
        steps += [delete(0.5 + rng.random() * scene.over_s) for _ in range(scene.deletions)]
        return steps + [restart(0.5 + rng.random() * scene.over_s) for _ in range(scene.restarts)]

    def _orphans(self) -> list[str]:
        """The outputs that no record names."""
        now = self.net.loop.time()
        named = {
            msgspec.msgpack.decode(entry.value, type=Record).output_key
            for key, entry in self.net.requests.scan("s.", now_s=now)
            if key not in self.ignored
        }
        outputs = self.net.requests.scan("o.", now_s=now)
        return [key for key, _ in outputs if key not in named]

    # ------------------------------------------------------------ the reckoning

    def reckon(self) -> None:
        """Check that no request is lost or doubled and nothing is left over, once nothing moves."""
        for check in self.cores.values():
            check()
        now = self.net.loop.time()
        records = {}
        outputs = {key: entry.value for key, entry in self.net.requests.scan("o.", now_s=now)}
        for key, entry in self.net.requests.scan("s.", now_s=now):
            if key in self.ignored:
                continue
            record = msgspec.msgpack.decode(entry.value, type=Record)
            records[record.key] = record
            assert record.verdict is not None, f"{key} has not ended: {record.state}"
        for request_id, seen in self.seen.items():
            if seen.refused:
                self._check_refused(request_id, seen, records.get(f"default.{request_id}"))
                continue
            record = records[f"default.{request_id}"]
            verdict = record.verdict
            assert len(seen.ends) == 1, f"{request_id} ended {len(seen.ends)} times"
            assert seen.ends[0].verdict == verdict, (
                f"{request_id}: the client received another verdict"
            )
            resume = (
                msgspec.msgpack.decode(
                    opened(record.output_key, outputs[record.output_key]), type=Resume
                )
                if record.output_key
                else record.resume
            )
            final = unpack_list(resume.tokens)
            assert seen.tokens == final, (
                f"{request_id}: client has {len(seen.tokens)} tokens, record {len(final)}"
            )
            assert seen.text == resume.text, f"{request_id}: text differs"
            assert verdict.output_tokens == len(final)
            self._check_output(request_id, verdict.finish_reason, final, resume.text, record)
            self._check_stage(request_id, len(final), record, resume)
            if verdict.finish_reason is FinishReason.CANCELLED:
                assert request_id in self.cancelled
            elif verdict.finish_reason is FinishReason.FAILED:
                assert request_id in self.deleted
                assert verdict.message == "its record was deleted"
            else:
                assert verdict.finish_reason in (
                    FinishReason.STOP,
                    FinishReason.LENGTH,
                    FinishReason.REFUSED,
                ), verdict
        assert not [error for planner in self.planners for error in planner.broken], (
            "a seat was broken"
        )
        self._check_attempts()
        self._check_usage(len(records))
        if self.scene.prefixes:
            self.found_tokens = check_prefixes(self.living, self.engines, self.requests)
        for n in range(self.scene.replicas):
            rows = self.net.acks.read(subjects.ack_log(f"r{n}"), after=0)
            fold([decode_entry(payload) for _, payload in rows], ReplicaId(f"r{n}"))

    def _check_usage(self, ended: int) -> None:
        """No end is counted twice, and none is missing unless a process was killed before it had
        stored what it counted.
        """
        sums = self.net.usage.scan("", now_s=self.net.loop.time())
        counted = sum(
            msgspec.msgpack.decode(entry.value, type=DaySum).requests for _, entry in sums
        )
        assert counted <= ended or self.deleted, f"{counted} ends are counted, of {ended}"
        if not (self.scene.kills or self.deleted):
            assert counted == ended, f"{counted} ends are counted, of {ended}"

    def _check_refused(self, request_id: str, seen: Seen, record: Record | None) -> None:
        """A client that is told no has no tokens and no other end. A copy that it had sent before,
        and that was read late, was cancelled.
        """
        assert not seen.ends, request_id
        assert not seen.tokens, request_id
        told_no = (FinishReason.REFUSED, FinishReason.CANCELLED)
        assert record is None or record.verdict.finish_reason in told_no, request_id

    def _check_stage(self, request_id: str, made: int, record: Record, resume: Resume) -> None:
        """Check that the thinking ended where it should and that the deadlines are those of the
        stages, whichever replicas made the tokens.
        """
        thinking, slo = self.requests[request_id].sampling.thinking_tokens or 0, record.slo
        assert record.verdict is not None
        assert record.verdict.thinking_tokens == (min(thinking, made) if slo.thinks else 0), (
            request_id
        )
        if slo.thinks and made:
            steps = max(0, min(made, thinking - 1))  # to a token that is thinking
            due_s = (
                slo.first_due_unix_s(record.arrived_unix_s)
                + steps * slo.pace_s(True)
                + (made - steps) * slo.pace_s(False)
            )
            assert abs(resume.measure.next_due_unix_s - due_s) < 1e-4, (
                f"{request_id}: another deadline"
            )

    def _check_attempts(self) -> None:
        """Check that once an attempt has made a token, no earlier attempt makes another: no second
        text can be spliced in.
        """
        spoken: dict[str, int] = {}
        at_slot: dict[tuple[str, str, int], tuple[str, int]] = {}
        for subject, payload in self.written:
            ack = decode_entry(payload)
            if not isinstance(ack, PlanAck):
                continue
            for held in ack.held:
                at_slot[subject, ack.incarnation, held.slot] = (held.key, held.attempt)
                asked = self.requests[held.key.partition(".")[2]]
                assert self.scene.suits(ack.replica, asked), f"{held.key} came to a wrong replica"
            for slot, emitted in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
                if emitted:
                    key, attempt = at_slot[subject, ack.incarnation, slot]
                    assert attempt >= spoken.get(key, 0), (
                        f"{key}: attempt {attempt} spoke after attempt {spoken[key]}"
                    )
                    spoken[key] = attempt

    def _check_output(
        self, request_id: str, reason: FinishReason, tokens: list[int], text: str, record: Record
    ) -> None:
        """Check that no token is skipped, doubled or spliced in: the tokens of the sim engine are a
        function of the request and the position.
        """
        request = self.requests[request_id]
        seed = seed_of(record.key, request.sampling)
        assert tokens == [readable_token(seed, n) for n in range(len(tokens))], (
            f"{request_id}: not its own tokens"
        )
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert len(tokens) == min(
                request.sampling.output_tokens or 1 << 30, record.max_tokens
            ), request_id
            assert text == bytes(tokens).decode()


def run(seed: int, scene: Scene | None = None) -> World:
    """Play one schedule. Raises AssertionError with the seed and the newest messages."""
    worlds: list[World] = []

    async def main() -> None:
        worlds.append(World(scene or Scene(), seed))
        await worlds[0].play()

    stored = worker.WorkerService._stored
    if scene and scene.acks:
        spoil_acks(scene.acks, random.Random(seed), "r0")
    try:
        run_virtual(main())
    except BaseException as error:
        story = worlds[0].net.story() if worlds else ""
        raise AssertionError(f"seed {seed}: {error!r}\n{story[-6000:]}") from error
    finally:
        worker.WorkerService._stored = stored  # type: ignore[method-assign]
    return worlds[0]
