"""Runs a whole fleet on this machine: a nats-server of its own and every service as a process, kept
alive until the context is left.

async with Fleet(FleetSpec(replicas=2, pace=0.2)) as fleet:
    ...  # fleet.connect("name"), fleet.http_url, fleet.process("worker-r1").kill()
"""

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import httpx
from msgspec import Struct

from loadgen.access import Access, noted
from loadgen.fleet.child import Child, ChildError, Say
from loadgen.fleet.gpus import cores, devices, model_of, role_of
from loadgen.fleet.nats_server import (
    MAX_PAYLOAD_BYTES,
    find_binary,
    greets,
    include_line,
    server_config,
)
from loadgen.fleet.ports import HOST, free_port
from loadgen.fleet.refusal_watch import tell_refusals
from loadgen.fleet.scaler import Scaler
from loadgen.fleet.store_watch import keep_writable
from loadgen.load.connection import bus_at
from loadgen.simulator.deployment import ACCEPTANCE
from shared import subjects
from shared.bus.api import Bus
from shared.bus.nats import CONNECT_S, NatsBus
from shared.bus.users import OPERATOR, Role, User
from shared.client.ping import answers
from shared.errors import ConfigError, SlacklineError
from shared.models import shipped as models
from shared.perf.draft import DraftCost
from shared.policy import registry
from shared.process import configuration as config
from shared.process.stopping import GRACE_S
from shared.schemas import Digest
from shared.vocabulary import ReplicaId

if TYPE_CHECKING:
    from loadgen.fleet.key_folder import Keys

Result = TypeVar("Result")

POLL_S = 0.05
PING_S = 1.0  # for one answer of the services API
READY_S = 300.0  # two torch engines import and load on two cores in 15 s, if these are idle
VLLM_READY_S = 1800.0  # loads weights, compiles, records CUDA graphs
ENGINES = ("sim", "torch", "vllm")
METRICS_PORT = "SLACKLINE_METRICS_PORT"
SCALER = "fleet.scaler"  # the task's name
# the order in which processes stop
STOPPED = (("gateway",), ("worker",), ("planner", "relegation"), ("admission",), ("nats-server",))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """The fleet to start. An empty text stands for the default of the services' configuration."""

    replicas: int = 2  # of each model
    most: int = 0  # so many run at most, as many as are needed; 0: `replicas`, all the time
    roles: Sequence[str] = ()  # of the replicas, the last of the rest; KV moves then
    policy: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)  # of the policy
    engine: str = "sim"
    model: str = models.DEFAULT  # torch, vllm: a shipped model, or a folder
    # several models in place of `model` and `profile`: by name the folder, or for sim the profile
    models: Mapping[str, str] = field(default_factory=dict)
    draft_model: str = ""  # torch: as WorkerConfig has it
    profile: str = ""
    pace: float = 1.0  # sim: wall-clock seconds per second of the profile
    # sim: its draft's cost, in fractions of the target's times; None: as the profile states it
    draft: DraftCost | None = None
    acceptance: float = ACCEPTANCE  # sim: the mean acceptance of a first draft
    vllm: Mapping[str, Any] = field(default_factory=dict)  # arguments, by vLLM's names
    adapters: Mapping[str, str] = field(default_factory=dict)  # vllm: LoRA adapters, name to folder
    tiers: str = ""
    planners: int = 1
    admissions: int = 1
    gateway: bool = True
    metrics: bool = False  # each process serves its metrics, on a port of its own
    url: str = ""  # of a NATS server that runs already, and asks for no key; empty: its own
    port: int = 0  # of the fleet's own NATS; 0: any free one
    http_port: int = 0  # of the gateway; 0: any free one
    tenants: Sequence[str] = (subjects.DEFAULT_TENANT,)  # with a key each at NATS
    # commands of the same user find the operator's keys, before any service answers
    noted: bool = False
    # keeps requests, logs and keys; None: a folder that is removed with the fleet
    store: Path | None = None
    drain_s: float = 5.0  # each service may take so long to stop
    environment: Mapping[str, str] = field(default_factory=dict)  # SLACKLINE_... of every service

    @property
    def workers(self) -> int:
        """The replicas that run from the start."""
        return self.replicas * max(len(self.models), 1)

    @property
    def places(self) -> int:
        """The replicas that may run."""
        return max(self.workers, self.most)

    def check(self) -> None:
        """Raises ConfigError for a fleet that cannot be."""
        if self.replicas < 1 or self.planners < 1 or self.admissions < 1:
            raise ConfigError("a fleet has at least one replica, one planner and one admission")
        if self.most and (self.most < self.replicas or self.models):
            raise ConfigError("the most replicas are fewer than the fewest, or of several models")
        if self.engine not in ENGINES:
            raise ConfigError(f"unknown engine {self.engine!r}: {', '.join(ENGINES)}")


class Chosen(Struct, frozen=True):
    """The policy, as every service reads it."""

    policy: str = registry.DEFAULT
    settings: dict[str, str] = {}


class Fleet:
    """Use as `async with Fleet(spec) as fleet`, in the main thread (see loadgen/fleet/lifeline.py).
    Entered, it is ready for requests.

    Entering raises ConfigError or ChildError. A caller that stays inside for long also waits for
    `failed`, which never has a result, and has an exception once a process cannot be kept alive.
    """

    def __init__(self, spec: FleetSpec, say: Say = lambda _: None) -> None:
        self.spec = spec
        self.url = ""
        self.http_url = ""  # empty without a gateway
        self.folder = Path()
        self.keys: Keys | None = None  # none at a server that runs already
        self.pools: dict[ReplicaId, str] = {}
        self.metrics: dict[str, str] = {}  # the address of each process's own, by its name
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda f: f.cancelled() or f.exception())  # reads it
        self._say = say
        self._children: dict[str, Child] = {}
        self._awaited = ["nats-server"]  # while starting: the processes that are not ready yet
        self._keepers: set[asyncio.Task[None]] = set()
        self._temporary = False  # the folder
        self._patient = False  # started: what dies from now on is started again
        self.running: set[ReplicaId] = set()  # whose worker starts, runs or leaves
        self._exit = contextlib.ExitStack()

    def process(self, name: str) -> Child:
        """The process of this name: nats-server, admission, planner, relegation, gateway,
        worker-r1, ...; a second planner is planner-2.
        """
        return self._children[name]

    def access(self, user: User = OPERATOR) -> Access:
        """The access of a user to the NATS server."""
        if self.keys is None:
            return Access(self.url)
        return Access(self.url, str(self.keys.creds(user)), str(self.keys.tls_ca(user)))

    def connect(
        self, name: str, user: User = OPERATOR, connect_s: float = CONNECT_S
    ) -> contextlib.AbstractAsyncContextManager[NatsBus]:
        """A connection of this user."""
        return bus_at(self.access(user), name, user, connect_s)

    @property
    def processes(self) -> list[Child]:
        """All processes in the order of their start."""
        return list(self._children.values())

    @property
    def replicas(self) -> list[ReplicaId]:
        """All that may run; `running` has those that do."""
        return [ReplicaId(f"r{n}") for n in range(1, self.spec.places + 1)]

    @property
    def awaited(self) -> list[str]:
        """While it starts: the processes that are not ready yet."""
        return list(self._awaited)

    async def __aenter__(self) -> Self:
        ready_s = VLLM_READY_S if self.spec.engine == "vllm" else READY_S
        try:
            async with asyncio.timeout(ready_s):
                await self.unless_failed(self._start())
        except TimeoutError as error:
            await self._stop(keep_logs=True)
            raise ChildError(
                f"the fleet was not ready within {ready_s:g} s: {self._still_awaited()}"
            ) from error
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    # ------------------------------------------------------------ start

    async def _start(self) -> None:
        self.spec.check()
        self.pools = self._pools(self._environment())  # an unknown policy starts nothing
        self.folder = self._take_folder()
        (self.folder / "logs").mkdir(exist_ok=True)
        if self.spec.url:
            self.url = self.spec.url
        else:
            self._make_keys()
            await self._start_nats()
        if self.spec.noted:
            self._exit.enter_context(noted(self.access()))
        async with self.connect("slackline-fleet") as bus:
            for told in await bus.make_streams(self.replicas):
                self._say(told)
        environment = self._environment()
        for n in range(self.spec.admissions):
            self._add("admission", n, environment)
        for n in range(self.spec.planners):
            self._add("planner", n, environment)
        self._add("relegation", 0, environment)
        for replica in self.replicas[: self.spec.workers]:
            self.start_worker(replica)
        if self.spec.gateway:
            its_own = {"SLACKLINE_GATEWAY_PORT": str(self.spec.http_port)}
            self._add("gateway", 0, environment | its_own)
        async with self.connect("slackline-fleet") as bus:
            await self._until_ready(bus)
        if self.spec.gateway:
            await self._until_http()
        self._patient = True
        for child in self._children.values():
            child.patient = True
        ruled = [c for c in self.processes if c.name.startswith(("admission", "gateway"))]
        self._keep(tell_refusals(ruled, self._say), "fleet.refusals")
        if self.spec.most:
            self._keep(Scaler(self, self.spec.replicas, self.connect, self._say).run(), SCALER)

    def start_worker(self, replica: ReplicaId) -> None:
        """Start the worker of this replica, for the first time or again."""
        self.running.add(replica)
        if (name := f"worker-{replica}") in self._children:
            self._children[name].start()
            return
        environment, n = self._environment(), self.replicas.index(replica)
        named = {"SLACKLINE_WORKER_REPLICA": replica, "SLACKLINE_WORKER_POOL": self.pools[replica]}
        its_own = named | model_of(self.spec, n) | role_of(self.spec, n)
        its_own |= devices(self.spec, n, environment) | self._login(User(Role.WORKER, replica))
        self._spawn(name, _service("worker"), environment | its_own)
        self._children[name].patient = self._patient

    async def stop_worker(self, replica: ReplicaId) -> None:
        """The worker of this replica hands its requests on, and ends."""
        await self._children[f"worker-{replica}"].stop(self.spec.drain_s + GRACE_S)
        self.running.discard(replica)

    def _take_folder(self) -> Path:
        """The folder of the store, locked: two servers on one store would corrupt it."""
        if self.spec.store is None:
            folder = Path(tempfile.mkdtemp(prefix="slackline-"))
            self._temporary = True
            return folder
        folder = self.spec.store.absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = self._exit.enter_context((folder / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder} is in use by another fleet") from error
        except OSError as error:
            raise ConfigError(f"{folder} cannot be used: {error}") from error
        return folder

    def _make_keys(self) -> None:
        from loadgen.fleet.key_folder import Keys  # cryptography takes 0.1 s to import

        self.keys = Keys(self.folder / "keys")
        workers = [User(Role.WORKER, replica) for replica in self.replicas]
        self.keys.add([*workers, *(User(Role.TENANT, tenant) for tenant in self.spec.tenants)])

    async def _start_nats(self) -> None:
        port, monitor = self.spec.port or free_port(), f"{HOST}:{free_port()}"
        conf = self.folder / "nats-server.conf"
        lines = server_config(HOST, port, MAX_PAYLOAD_BYTES, self.folder / "jetstream")
        lines.append(f'http: "{monitor}"')
        if self.keys is not None:
            lines.append(include_line(self.keys.server_conf, conf))
        conf.write_text("\n".join(lines) + "\n")
        self.url = f"nats://{HOST}:{port}"
        command = [str(find_binary()), "--config", str(conf)]
        self._spawn("nats-server", command, dict(os.environ), suffix="log")
        while not await asyncio.to_thread(greets, self.url):
            await asyncio.sleep(POLL_S)
        server = self._children["nats-server"]
        writable = keep_writable(server, f"http://{monitor}", self.folder, self._say)
        self._keep(writable, "fleet.store")

    def _environment(self) -> dict[str, str]:
        spec = self.spec
        model = "" if spec.engine == "sim" or spec.models else spec.model
        folders = {} if spec.engine == "sim" else spec.models
        given = {
            "SLACKLINE_POLICY": spec.policy,
            "SLACKLINE_SETTINGS": json.dumps(dict(spec.settings)) if spec.settings else "",
            "SLACKLINE_TIERS": spec.tiers,
            "SLACKLINE_ADMISSION_MODEL": model,
            "SLACKLINE_ADMISSION_MODELS": ",".join(
                f"{n}={folder}" for n, folder in folders.items()
            ),
            "SLACKLINE_WORKER_MODEL": model,
            "SLACKLINE_WORKER_DRAFT_MODEL": spec.draft_model,
            "SLACKLINE_WORKER_PROFILE": spec.profile,
            "SLACKLINE_WORKER_DRAFT": "" if spec.draft is None else json.dumps(spec.draft),
            "SLACKLINE_WORKER_VLLM": json.dumps(dict(spec.vllm)) if spec.vllm else "",
            "SLACKLINE_WORKER_ADAPTERS": json.dumps(dict(spec.adapters)) if spec.adapters else "",
        }
        fixed = {
            "SLACKLINE_URL": self.url,
            "SLACKLINE_WORKER_ENGINE": spec.engine,
            "SLACKLINE_WORKER_PACE": str(spec.pace),
            "SLACKLINE_WORKER_ACCEPTANCE": str(spec.acceptance),
            "SLACKLINE_GATEWAY_HOST": HOST,
            **{
                f"SLACKLINE_{s}_DRAIN_S": str(spec.drain_s)
                for s in ("ADMISSION", "PLANNER", "RELEGATION", "WORKER", "GATEWAY")
            },
        }
        # More threads than cores make a model on the CPU ten times slower.
        threads = {"OMP_NUM_THREADS": str(max(1, cores() // (2 * spec.places)))}
        return (
            threads
            # a port that all processes would want
            | {name: value for name, value in os.environ.items() if name != METRICS_PORT}
            | {name: value for name, value in given.items() if value}
            | fixed
            | dict(spec.environment)
        )

    def _pools(self, environment: Mapping[str, str]) -> dict[ReplicaId, str]:
        """Each replica's pool: the policy's in turn, as simulated; empty without pools."""
        chosen = config.load(Chosen, "fleet", environment)
        pools = registry.make(chosen.policy, chosen.settings).declared.pools
        each = self.spec.replicas  # of one model, in a row
        return {replica: pools[n % each % len(pools)] for n, replica in enumerate(self.replicas)}

    def _add(self, service: str, n: int, environment: dict[str, str]) -> None:
        name, login = service if n == 0 else f"{service}-{n + 1}", self._login(User(Role(service)))
        self._spawn(name, _service(service), environment | login)

    def _login(self, user: User) -> dict[str, str]:
        access = self.access(user)
        return {"SLACKLINE_CREDS": access.creds, "SLACKLINE_TLS_CA": access.tls_ca}

    def _spawn(
        self, name: str, command: list[str], environment: dict[str, str], suffix: str = "jsonl"
    ) -> None:
        if self.spec.metrics and name not in ("nats-server", "gateway"):
            port = free_port()
            environment = environment | {METRICS_PORT: str(port)}
            self.metrics[name] = f"http://{HOST}:{port}/metrics"
        log = self.folder / "logs" / f"{name}.{suffix}"
        self._children[name] = child = Child(name, command, environment, log, self._say)
        self._keep(child.keep(), f"fleet.{name}")

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Do `work` as long as the fleet lives; if `work` fails, the fleet fails."""
        keeper = asyncio.create_task(work, name=name)
        self._keepers.add(keeper)
        keeper.add_done_callback(self._kept)

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    # ------------------------------------------------------------ being ready

    async def _until_ready(self, bus: Bus) -> None:
        """Wait until every kind of service answers, and there is a digest of every replica."""
        planned: set[ReplicaId] = set()
        digests = await bus.subscribe(
            subjects.DIGESTS, Digest, lambda digest, _: planned.add(digest.replica)
        )
        for service in ("admission", "requests", "planner", "relegation", "worker"):
            process = "admission" if service == "requests" else service
            self._awaited = [name for name in self._children if name.startswith(process)]
            while not await answers(bus, service, PING_S):
                await asyncio.sleep(POLL_S)
        while missing := sorted(self.running - planned):
            self._awaited = [f"worker-{replica}" for replica in missing]
            await asyncio.sleep(POLL_S)
        await digests.stop()

    async def _until_http(self) -> None:
        """Wait until the gateway knows a replica. Its port is kept over restarts."""
        gateway, self._awaited = self._children["gateway"], ["gateway"]
        while (address := gateway.address()) is None:
            await asyncio.sleep(POLL_S)
        self.http_url = address
        if self.spec.metrics:
            self.metrics["gateway"] = f"{address}/metrics"
        gateway.environment["SLACKLINE_GATEWAY_PORT"] = address.rpartition(":")[2]
        # our own child, whose certificate, if it has one, names another address
        async with httpx.AsyncClient(trust_env=False, verify=False) as http:
            while reason := await _unready(http, address):
                self._awaited = [f"gateway ({reason})"]
                await asyncio.sleep(POLL_S)

    async def _until_idle(self) -> None:
        """Wait until no replica has work by its digests, drain_s is over, or NATS is silent."""
        busy = set(self.running)

        def on_digest(digest: Digest, _: object) -> None:
            if digest.waiting or digest.running or digest.best_effort:
                busy.add(digest.replica)
            else:
                busy.discard(digest.replica)

        with contextlib.suppress(TimeoutError, SlacklineError):
            async with (
                asyncio.timeout(self.spec.drain_s),
                self.connect("slackline-fleet", connect_s=1.0) as bus,
            ):
                await bus.subscribe(subjects.DIGESTS, Digest, on_digest)
                while busy:
                    await asyncio.sleep(POLL_S)

    def _still_awaited(self) -> str:
        late = [self._children[name] for name in self._awaited if name in self._children]
        return "\n".join(
            f"{child.name} is still awaited; {child.log} says:\n{child.tail()}" for child in late
        )

    async def unless_failed(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do `work`, unless a process fails first: then raise its error."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self.failed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.failed.result()
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # ------------------------------------------------------------ stop

    async def _stop(self, *, keep_logs: bool = False) -> None:
        """Stop in order: no new requests over HTTP, running requests may finish, then the other
        services. Admission settles the requests that workers give back; NATS is last.

        Cancelled meanwhile, it kills all processes at once.
        """
        within_s = self.spec.drain_s + GRACE_S
        for keeper in self._keepers:
            if keeper.get_name() == SCALER:
                keeper.cancel()  # it starts no worker any more
        try:
            for stage in STOPPED:
                if "worker" in stage:
                    await self._until_idle()
                children = [child for child in self.processes if child.name.startswith(stage)]
                await asyncio.gather(*(child.stop(within_s) for child in children))
        finally:
            for child in self._children.values():
                child.abandon()
            await asyncio.gather(*(child.stop(GRACE_S) for child in self._children.values()))
            for keeper in self._keepers:
                keeper.cancel()
            await asyncio.gather(*self._keepers, return_exceptions=True)
            if self._temporary and not keep_logs and not self.failed.done():
                shutil.rmtree(self.folder, ignore_errors=True)
            self.failed.cancel()
            self._exit.close()


def _service(name: str) -> list[str]:
    return [sys.executable, "-m", f"services.{name}"]


async def _unready(http: httpx.AsyncClient, address: str) -> str:
    """Why the gateway is not ready, in its own words; empty once the gateway is ready."""
    try:
        answer = await http.get(f"{address}/ready")
    except httpx.HTTPError as error:
        return repr(error)
    return "" if answer.status_code == httpx.codes.OK else str(answer.json()["reason"])
