"""The admission service: any instance takes requests in, places them and records their ends."""

import asyncio
from contextlib import suppress
from random import Random

import structlog

from services.admission.cancels import Cancels
from services.admission.config import AdmissionConfig
from services.admission.endpoints.explain import Explanations
from services.admission.endpoints.replay import Replays
from services.admission.endpoints.tokenize import TokenizeEndpoint
from services.admission.ends import Ends
from services.admission.intake.arrivals import Arrivals
from services.admission.intake.gate import IntakeGate
from services.admission.intake.reading import Intake
from services.admission.intake.refusals import Refusals
from services.admission.intake.rounds import Rounds
from services.admission.intake.stall import Stall
from services.admission.intake.task_store import TaskStore
from services.admission.intake.token_bucket import TokenBuckets
from services.admission.placement import Placement
from services.admission.sweep import Sweep
from services.admission.tokenizers import Tokenizers
from services.admission.workers import Workers
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.core.admission.admission import AdmissionCore, AdmissionSettings, Heard, Pooled, Told
from shared.core.scaling.tally import ArrivalTally
from shared.errors import BusError
from shared.placing.ending import Ending
from shared.placing.lacking import ask_for_lacking
from shared.placing.outcomes import Outcomes
from shared.placing.place import OfferMetrics, Placer
from shared.policy import registry
from shared.process.chores import Chores
from shared.process.drive import drive
from shared.process.reload import follow_files, rules_of
from shared.schemas import (
    Announce,
    Attach,
    AttemptOver,
    Cancel,
    Detokenize,
    Digest,
    Explain,
    FindEnded,
    GenerateRequest,
    PoolDigest,
    Record,
    Tokenize,
)
from shared.store.leases import RENEW_S, Lease
from shared.store.presence import Absences, be_present
from shared.store.records import Records
from shared.store.usage import Usage
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing

log = structlog.get_logger()

QUEUE = "admission"
ARRIVALS_S = 1.0  # between two messages about the work that came


class Admission:
    def __init__(
        self,
        cfg: AdmissionConfig,
        bus: Bus,
        clock: Clock,
        tokenizers: Tokenizers,
        tracing: Tracing,
        rng: Random,
    ) -> None:
        self._cfg, self._bus, self._clock = cfg, bus, clock
        self.name = f"admission-{rng.getrandbits(48):012x}"
        self._rules, self._buckets = rules_of(cfg), TokenBuckets()
        records = Records(bus.requests, bus.bodies, lambda: f"{rng.getrandbits(32):08x}")
        self.metrics, self._chores = Registry(), Chores()
        self._workers = Workers(clock, cfg.lost_s, self.metrics, cfg.return_s)
        outcomes = Outcomes(
            self.metrics, lambda: self._workers.models, lambda: self._rules.tiers.tiers
        )
        self._usage = Usage(bus.usage, self.name)
        ending = Ending(bus, records, tracing, outcomes, self._usage, self._pay)
        self._replays = Replays(bus, records, clock, lambda key: self._sweep.missed(key))
        self._explanations = Explanations(records, self._replays, bus.history, clock)
        self._tokenizers = tokenizers
        self._tokenize = TokenizeEndpoint(tokenizers, self._workers, self._rules)
        placer = Placer(bus, records, clock, tracing, OfferMetrics(self.metrics))
        router = registry.router(cfg.policy, cfg.settings)
        settings = AdmissionSettings(
            hop_limit=cfg.hop_limit,
            homeless_s=cfg.homeless_s,
            open_limit=cfg.open_limit,
            pool_limit=cfg.pool_limit,
        )
        self.core = AdmissionCore(router, rng, settings)
        intake = Intake(self._rules, tokenizers, self._workers, records.body_key, self.name)
        absences = Absences(bus, clock)
        self._placement = Placement(
            self.name, bus, clock, records, placer, ending, self._chores, self._soon
        )
        self._sweep = Sweep(
            cfg,
            bus,
            clock,
            self.name,
            records,
            placer,
            self._workers,
            absences,
            self.core,
            ending,
            self._placement.feed,
        )
        swept = self.metrics.gauge(names.LAST_SWEEP, "When the last whole sweep ended.").labels()
        self.metrics.before_scrape(lambda: swept.set(self._sweep.swept_unix_s))
        text = "Replicas whose kept prefixes are not known here: none of a prompt is found there."
        lacking = self.metrics.gauge(names.PREFIXES_LACKING, text).labels()
        self.metrics.before_scrape(lambda: lacking.set(len(self.core.lacking)))
        self._ends = Ends(
            self.name, clock, records, placer, ending, self._placement, self._chores, self._soon
        )
        self._cancels = Cancels(records, self._placement, self._chores, self._soon)
        self._stall = Stall(bus, clock)
        self._tally = ArrivalTally(self._model_of)
        self._arrivals = Arrivals(
            cfg,
            self.name,
            clock,
            tracing,
            self._rules,
            self._buckets,
            records,
            placer,
            self.core,
            intake,
            Rounds(TaskStore(bus.requests, records)),
            self._placement,
            self._cancels,
            Refusals(bus, outcomes, self._chores),
            self._sweep,
            self._stall,
            self._chores,
            self._tally,
            tokenizers.tool_format,
        )
        self._lease = Lease(bus.leases, f"admission.{self.name}", self.name, absences)
        requests = Endpoint(
            "requests",
            subjects.REQUESTS,
            GenerateRequest,
            self._arrivals.on_request,
            QUEUE,
            self._arrivals.gate,
        )
        self._gate = IntakeGate(bus, clock, requests, self.name)

    def _soon(self) -> None:
        self._sweep.soon()

    # ------------------------------------------------------------ life

    async def run(self, stop: asyncio.Event) -> None:
        bus = self._bus
        endpoints = [
            Endpoint("attach", subjects.ATTACHES, Attach, self._on_attach, QUEUE),
            Endpoint("explain", subjects.EXPLAINS, Explain, self._on_explain, QUEUE),
            Endpoint("explain-all", subjects.EXPLAIN_ALL, Explain, self._on_explain, QUEUE),
            Endpoint("history", subjects.HISTORIES, FindEnded, self._on_explain, QUEUE),
            Endpoint("history-all", subjects.HISTORY_ALL, FindEnded, self._on_explain, QUEUE),
            Endpoint("tokens", subjects.TOKENS, Tokenize | Detokenize, self._on_tokens, QUEUE),
            Endpoint("over", subjects.OVERS, AttemptOver, self._ends.on_over, QUEUE),
        ]
        async with self._chores as chores:
            chores.listen(await bus.subscribe(subjects.DIGESTS, Digest, self._on_digest))
            chores.listen(await bus.subscribe(subjects.POOL, PoolDigest, self._on_pool))
            chores.listen(await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, self._on_announce))
            chores.listen(
                await bus.subscribe(subjects.CANCELS, Cancel, self._cancels.on_cancel, queue=QUEUE)
            )
            chores.listen(await bus.subscribe(subjects.CANCELS, Cancel, self._cancels.note))
            chores.listen(await be_present(bus, self.name))
            background = [
                chores.start(self._keep_lease(), name="admission.lease"),
                chores.start(self._sweep.run(), name="admission.sweep"),
                chores.start(self._stall.watch(), name="admission.stall"),
                chores.start(self._usage.run(), name="admission.usage"),
                chores.start(self._tell_arrivals(), name="admission.arrivals"),
                chores.start(
                    ask_for_lacking(
                        bus,
                        lambda: self.core.lacking,
                        lambda *told: self._placement.feed(Told(*told)),
                    ),
                    name="admission.prefixes",
                ),
                chores.start(
                    follow_files("admission", self._cfg, self._rules), name="admission.rules"
                ),
            ]
            driver = chores.start(
                drive(
                    self.core,
                    self._placement.inbox,
                    self._placement.begin,
                    self._clock,
                    name="admission",
                ),
                "admission.drive",
            )
            answers = chores.listen(
                await bus.serve("admission", endpoints, {"instance": self.name})
            )
            opening = chores.start(self._gate.keep(), name="admission.door")
            log.info(
                "admission.ready",
                instance=self.name,
                policy=self._cfg.policy,
                tiers=self._rules.tiers.name,
            )
            await stop.wait()
            opening.cancel()
            await asyncio.wait((opening,))
            await self._gate.close()
            await answers.stop()  # an ended attempt goes to another instance; its worker repeats it
            await self._drain(driver)
            for task in (*background, driver):
                task.cancel()
        await self._usage.store()

    async def _drain(self, driver: asyncio.Task[None]) -> None:
        """Place open requests. Another instance takes over those left after drain_s."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._cfg.drain_s):
                # requests already delivered start, so that they are counted
                await asyncio.sleep(0.02)
                while not (self._arrivals.idle and self._placement.idle):
                    await asyncio.sleep(0.02)
                self._placement.inbox.drain()
                await asyncio.wait((driver,))
        with suppress(BusError):  # the lease runs out by itself
            await self._lease.release()

    def _model_of(self, record: Record) -> str:
        """The model that a request is work for; empty: it is not known yet."""
        return record.model or min(self._workers.models, default="")

    async def _tell_arrivals(self) -> None:
        """Tell relegation the work that came, for the replicas needed."""
        while True:
            await asyncio.sleep(ARRIVALS_S)
            for work in self._tally.take():
                with suppress(BusError):  # a lost message counts as no work
                    await self._bus.publish(subjects.ARRIVED, work)

    async def _keep_lease(self) -> None:
        """Renew the lease: while it is held, no sweep takes over this instance's open requests."""
        while True:
            try:
                if not self._lease.held or not await self._lease.renew():
                    await self._lease.acquire()
            except BusError:
                log.warning("lease.doubtful", instance=self.name)
            await asyncio.sleep(RENEW_S)

    def _on_attach(self, attach: Attach, call: Call) -> None:
        self._chores.spawn(self._replays.answer(attach, call), "admission.attach")

    def _on_explain(self, explain: Explain | FindEnded, call: Call) -> None:
        self._chores.spawn(self._explanations.answer(explain, call), "admission.explain")

    def _on_tokens(self, question: Tokenize | Detokenize, call: Call) -> None:
        self._chores.spawn(self._tokenize.answer(question, call), "admission.tokens")

    def _pay(self, ended: Record) -> None:
        """The tenant's bucket pays for a request's output, whichever instance let it in."""
        assert ended.verdict is not None
        tenant, now = ended.key.partition(".")[0], self._clock.unix_s()
        limits, tokens = self._rules.tenants.named(tenant), ended.verdict.output_tokens
        self._buckets.take(tenant, limits, tokens, self._sweep.admissions, now)

    # ------------------------------------------------------------ digests and heartbeats

    def _on_digest(self, digest: Digest, call: Call) -> None:
        self._placement.feed(Heard(digest))

    def _on_pool(self, digest: PoolDigest, call: Call) -> None:
        self._placement.feed(Pooled(digest))

    def _on_announce(self, announce: Announce, call: Call) -> None:
        if call.subject != subjects.announce(announce.replica):
            return  # a worker speaks for itself only
        new = self._workers.last(announce.model) is None
        if self._workers.received(announce):
            self._sweep.soon()
        if new:  # before its first request
            reading = self._tokenizers.of(announce.model, announce)
            self._chores.spawn(reading, "admission.tokenizer")
