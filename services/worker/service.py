"""The worker service: takes requests in, runs plans, stores acks, and then lets tokens out."""

import asyncio
import secrets
from contextlib import suppress
from random import Random

import structlog

from services.worker.ack_writer import SNAPSHOT_BYTES, AckWriter, FencedError, Job
from services.worker.config import WorkerConfig
from services.worker.core.worker import WorkerCore
from services.worker.endpoints.holds import Holds, Mover
from services.worker.endpoints.over_reports import OverReports
from services.worker.endpoints.resyncs import Resyncs
from services.worker.metrics import WorkerMetrics
from services.worker.runner import Runner
from services.worker.traces import Traces
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.core.announced import as_announced
from shared.core.worker.step import Finished
from shared.errors import BusError, ConfigError, EngineError, PeerError, SlacklineError
from shared.models import shipped as models
from shared.process.audit import Audit
from shared.process.chores import Chores, before
from shared.schemas import (
    Announce,
    BatchPlan,
    Cancel,
    EngineTime,
    Fetch,
    Hold,
    Holdings,
    HoldingsAnswer,
    Record,
    Refused,
    Resync,
    Withdraw,
)
from shared.store.presence import be_present
from shared.store.records import Records
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import TRACEPARENT, Tracing
from shared.vocabulary import ReplicaId

log = structlog.get_logger()

LAST_WORDS_S = 5.0  # the longest that a worker without an engine still writes


class WorkerService:
    """One incarnation (life of the worker). `run` returns when stopped, or raises FencedError."""

    def __init__(
        self,
        cfg: WorkerConfig,
        bus: Bus,
        clock: Clock,
        runner: Runner,
        tracing: Tracing,
        rng: Random,
        metrics: WorkerMetrics,
        mover: Mover | None = None,
    ) -> None:
        facts = runner.facts
        self._cfg, self._bus, self._clock, self._runner = cfg, bus, clock, runner
        self._traces = Traces(tracing)
        self._facts, self._metrics = facts, metrics
        self._profile, self._fitted = (
            as_announced(cfg.profile or facts.profile)
            if runner.fitted is None
            else (runner.fitted.name, runner.fitted)
        )
        self._replica = ReplicaId(cfg.replica)
        real = facts.engine != "sim"
        self._folder = models.announced(cfg.model or models.DEFAULT) if real else ""
        self.incarnation = f"{rng.getrandbits(48):012x}"
        records = Records(bus.requests, bus.bodies)
        # The KV cache bounds the context, so that a request with no other always gets to its end.
        self._context_tokens = min(facts.context_tokens, facts.kv_blocks * facts.block_tokens)
        self.core = WorkerCore(
            self._replica,
            self.incarnation,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=self._context_tokens,
            max_slots=facts.max_slots,
            eos_token_ids=facts.eos_token_ids,
            end_of_thinking=facts.end_of_thinking,
            kv_address="" if mover is None else mover.address,
        )
        self._mover = mover
        self._writer = AckWriter(bus, self._replica, self.incarnation, records, limit=cfg.log_queue)
        self._audit = Audit(self.core, f"worker.{self._replica}", clock)
        self._wake, self._draining = asyncio.Event(), asyncio.Event()
        self._chores = Chores()
        self._holds = Holds(
            self.core,
            records,
            runner,
            clock,
            self._chores,
            mover,
            self._draining.is_set,
            self._taken,
            metrics.fetched,
        )
        self._resyncs = Resyncs(
            self.core, bus, self._replica, self._chores, self._announcement, self._forget_plans
        )
        self._overs = OverReports(self.core, bus, self._chores, retry_s=cfg.over_retry_s)
        self._plan_came_unix_s: dict[int, float] = {}
        self._last_end_unix_s = 0.0
        self._work_since_unix_s = 0.0
        self._acks_since_snapshot = 0
        self._published_ack_seq = 0
        self._leaves_unix_s: float | None = None

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then leave when every request has ended or goes on elsewhere."""
        if not await before(stop, self._writer.register()):
            return
        replica = self._replica
        endpoints = [
            Endpoint("hold", subjects.hold(replica), Hold, self._holds.on_hold),
            Endpoint("resync", subjects.resync(replica), Resync, self._resyncs.on_resync),
            Endpoint("withdraw", subjects.withdraw(replica), Withdraw, self._on_withdraw),
            Endpoint("holdings", subjects.holdings(replica), Holdings, self._on_holdings),
        ]
        fences: list[BaseException] = []
        try:
            async with self._chores as chores:
                background = [
                    chores.start(self._engine_loop(), name="worker.engine"),
                    chores.start(self._writer.run(self._stored), name="worker.acks"),
                    chores.start(self._announce_loop(), name="worker.announce"),
                    chores.start(self._overs.run(), name="worker.tell"),
                ]
                bus = self._bus
                chores.listen(await be_present(bus, self.incarnation))
                chores.listen(await bus.subscribe(subjects.plan(replica), BatchPlan, self._on_plan))
                chores.listen(await bus.subscribe(subjects.CANCELS, Cancel, self._on_cancel))
                fetches = subjects.fetch(replica)
                chores.listen(await bus.subscribe(fetches, Fetch, self._holds.on_fetch))
                chores.listen(
                    await bus.serve(
                        "worker", endpoints, {"replica": replica, "incarnation": self.incarnation}
                    )
                )
                log.info(
                    "worker.ready",
                    replica=replica,
                    incarnation=self.incarnation,
                    engine=self._facts.engine,
                    model=self._facts.model,
                )
                await stop.wait()
                await self._drain()
                for task in background:
                    task.cancel()
        except* FencedError as group:
            fences.extend(group.exceptions)
        if fences:
            raise FencedError(str(fences[0]))

    async def _drain(self) -> None:
        """Go on while the planner moves requests elsewhere, one after another. What is left for the
        last fifth of drain_s is given up at once.
        """
        deadline = self._clock.unix_s() + self._cfg.drain_s
        self._leaves_unix_s = deadline - self._cfg.drain_s / 5
        self._draining.set()
        await self._announce()
        while self.core.held and self._clock.unix_s() < self._leaves_unix_s:
            await asyncio.sleep(0.02)
        self.core.drain()
        self._wake.set()
        while (
            self.core.held or self.core.unsettled or not self._writer.queue.empty()
        ) and self._clock.unix_s() < deadline:
            await asyncio.sleep(0.02)

    # ------------------------------------------------------------ the engine's side

    async def _engine_loop(self) -> None:
        clock, core = self._clock, self.core
        while True:
            if (finished := core.between()) is not None:
                await self._writer.queue.put(Job(finished))
            self._resyncs.answer()
            began = clock.unix_s()
            step = core.begin(now_unix_s=began)
            if step is None:
                self._metrics.holds(core.held, 0, core.free_blocks)
                self._audit.look(idle=not core.held)
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                ran = await self._runner.run(step)
            except EngineError as error:
                await self._lost_engine(error)
                raise
            if step.plan is None:
                continue
            ended = clock.unix_s()
            idle_s = late_s = 0.0
            came = self._plan_came_unix_s.pop(step.plan.seq, began)
            if step.work:
                free = max(self._last_end_unix_s, self._work_since_unix_s)
                idle_s = max(0.0, came - free)
                late_s = ended - free - idle_s - ran.exec_s
                self._last_end_unix_s = ended
            finished = core.finish(
                ran, started_unix_s=began, ended_unix_s=ended, idle_s=idle_s, late_s=late_s
            )
            if step.work:
                self._metrics.ran(step, ran, idle_s, began, ended)
            self._traces.ran(step, ran, began, ended, idle_s)
            self._metrics.holds(core.held, len(step.work), core.free_blocks)
            if not core.held:
                self._forget_plans()
            self._acks_since_snapshot += 1
            snapshots = []
            if (
                self._acks_since_snapshot >= self._cfg.snapshot_acks
                or self._writer.acks_bytes >= SNAPSHOT_BYTES
            ):
                self._acks_since_snapshot = self._writer.acks_bytes = 0
                snapshots = core.snapshots()
            await self._writer.queue.put(Job(finished, snapshots))

    def _forget_plans(self) -> None:
        """Forget the plans that came and were not begun: they never will be."""
        self._plan_came_unix_s.clear()
        self._traces.forget_plans()

    async def _lost_engine(self, error: EngineError) -> None:
        """Log and store the ends of the step's requests: one that ends engines must not go on."""
        finished = self.core.break_off() if error.in_turn else None
        requests = [] if finished is None else [over.key for over in finished.overs]
        log.error("engine.lost", replica=self._replica, error=str(error), requests=requests)
        if finished is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await self._writer.queue.put(Job(finished))
                    await self._writer.queue.join()

    async def _stored(self, finished: Finished) -> None:
        """The ack is in the log: now it may be seen."""
        self._metrics.over(finished.overs)
        for over in finished.overs:
            self._overs.stored(over)
        try:
            self._published_ack_seq = finished.ack.ack_seq
            await self._bus.publish(subjects.acked(self._replica), finished.ack)
            for subject, json, event in finished.outgoing:
                await self._bus.publish(subject, event, json=json)
        except BusError as error:  # planners resync, clients attach
            log.warning("message.lost", task="worker.stored", error=str(error))

    # ------------------------------------------------------------ the planner's side

    def _on_plan(self, plan: BatchPlan, call: Call) -> None:
        waiting = self.core.waiting_plans
        refused = self.core.plan(plan)
        if self.core.waiting_plans > waiting:  # else it will not run
            self._plan_came_unix_s[plan.seq] = self._clock.unix_s()
            self._traces.planned(plan.seq, call.headers.get(TRACEPARENT))
        if refused is not None:
            log.warning("plan.refused", reason=refused.reason, seq=plan.seq, epoch=plan.epoch)
            self._chores.spawn(
                self._bus.publish(subjects.plan_refused(self._replica), refused), "worker.refused"
            )
        self._wake.set()

    def _taken(self, hold: Hold, record: Record, before: int) -> None:
        """The core holds the request of this hold. `before`: how many it held."""
        self._traces.held(hold.slot, record)
        if self.core.held > before:  # not a late copy of the hold
            self._metrics.held(hold.slot, record)
        if not before:
            self._work_since_unix_s = self._clock.unix_s()
        if self.core.closing:
            self._wake.set()

    # ------------------------------------------------------------ admission's side

    def _on_withdraw(self, withdraw: Withdraw, call: Call) -> None:
        if withdraw.incarnation != self.incarnation:
            message = "another incarnation had this attempt: its log says what became of it"
            answer = Refused(code="other_incarnation", message=message)
            self._chores.spawn(call.reply(answer), "worker.withdrawn")
            return
        if self._overs.withdraw(withdraw, call):
            self._wake.set()

    def _on_holdings(self, holdings: Holdings, call: Call) -> None:
        known = [self.core.knows(key, attempt) for key, attempt in holdings.asked]
        self._chores.spawn(
            call.reply(HoldingsAnswer(incarnation=self.incarnation, known=known)), "worker.holdings"
        )

    def _on_cancel(self, cancel: Cancel, call: Call) -> None:
        tenant, request_id = call.subject.split(".")[-2:]
        try:
            key = subjects.request_key(tenant, request_id)
        except PeerError:
            return
        self.core.cancel(key, cancel.reason)
        if self._mover is not None:
            self._mover.forget(key)
        self._wake.set()

    # ------------------------------------------------------------ announcing itself

    async def _announce_loop(self) -> None:
        while True:
            await self._announce()
            await asyncio.sleep(self._cfg.announce_s)
            if await self._writer.fenced():
                raise FencedError(f"{self._replica} was declared lost")

    async def _announce(self) -> None:
        try:
            await self._bus.publish(subjects.announce(self._replica), self._announcement())
        except BusError as error:
            log.warning("message.lost", task="worker.announce", error=str(error))

    def _announcement(self) -> Announce:
        facts, spent = self._facts, self.core.counters
        return Announce(
            replica=self._replica,
            incarnation=self.incarnation,
            at_unix_s=self._clock.unix_s(),
            model=facts.model,
            engine=facts.engine,
            profile=self._profile,
            pool=self._cfg.pool,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=self._context_tokens,
            max_slots=facts.max_slots,
            epoch=self.core.epoch,
            ack_seq=self._published_ack_seq,
            draining=self._draining.is_set() or self._writer.waits,
            leaves_unix_s=self._leaves_unix_s,
            fitted=self._fitted,
            pace=self._cfg.pace if facts.engine == "sim" else 1.0,
            draft=facts.draft,
            draft_kv_blocks=facts.draft_kv_blocks,
            longest_chain=facts.longest_chain,
            host_kv_blocks=facts.host_kv_blocks,
            kv_load_s=facts.kv_load_s,
            draft_yields=self.core.draft_yields,
            features=sorted(facts.features),
            adapters=list(facts.adapters),
            folder=self._folder,
            vocabulary=facts.vocabulary,
            time=EngineTime(
                exec_s=spent.exec_s,
                idle_s=spent.idle_s,
                late_s=spent.late_s,
                predicted_s=spent.predicted_s,
            ),
            tiers=self._cfg.silo,
            role=self._cfg.role,
            kv_address="" if self._mover is None else self._mover.address,
            kv_move_s=0.0 if self._mover is None else self._mover.move_s,
        )


async def refuse_a_twin(bus: Bus, replica: ReplicaId) -> None:
    """Raises ConfigError if a live worker has this id: the two would fence each other for ever."""
    try:
        answer = await bus.request(
            subjects.holdings(replica), Holdings(asked=[]), HoldingsAnswer, timeout_s=1.0
        )
    except SlacklineError:
        # nobody; or a dead worker's connection, or a paused worker: registering fences it
        return
    raise ConfigError(
        f"replica {replica!r} already has a live worker ({answer.incarnation}); "
        "set another SLACKLINE_WORKER_REPLICA"
    )


async def serve(
    cfg: WorkerConfig,
    bus: Bus,
    clock: Clock,
    runner: Runner,
    stop: asyncio.Event,
    *,
    tracing: Tracing,
    rng: Random | None = None,
    metrics: Registry | None = None,
    mover: Mover | None = None,
) -> None:
    """Run incarnations (lives of the worker) one after another, until stopped."""
    rng = rng or Random(secrets.randbits(64))
    subjects.check_id(cfg.replica, "replica")
    counted = WorkerMetrics(
        metrics or Registry(), ReplicaId(cfg.replica), runner.facts, runner.fitted
    )
    while not stop.is_set():
        await refuse_a_twin(bus, ReplicaId(cfg.replica))
        service = WorkerService(cfg, bus, clock, runner, tracing, rng, counted, mover)
        try:
            await service.run(stop)
        except FencedError as fenced:
            log.warning(
                "worker.fenced",
                replica=cfg.replica,
                incarnation=service.incarnation,
                reason=str(fenced),
            )
            await runner.reset()
            counted.forget()
            # if two fence each other, the worker that comes back later finds the other there
            await asyncio.sleep(rng.random())
