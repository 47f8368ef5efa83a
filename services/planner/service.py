"""The planner service: leases replicas, plans for them, gives one up if its lease is in doubt."""

import asyncio
from collections import deque
from contextlib import suppress
from random import Random

import structlog

from services.planner.config import PlannerConfig
from services.planner.metrics import PlannerMetrics
from services.planner.replica_planner import ReplicaPlanner, StaleEpoch
from shared import subjects
from shared.bus.api import LEASE_TTL_S, Bus, Call
from shared.clock import Clock
from shared.errors import BusError, ConfigError, PeerError
from shared.schemas import Announce, ReplicasNeeded
from shared.store.leases import RENEW_S, Lease
from shared.store.presence import Absences, be_present
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import MOST_REPLICAS, ReplicaId, Role

log = structlog.get_logger()

LOOK_S = 0.25  # between two looks for leases without a holder
SHUN_S = 10.0  # for this long a replica whose planning failed is left to other planners
SAFETY_S = 0.5  # a lease that is not renewed this long before its end is given up
MODELS_LIMIT = 64  # whose roles are heeded
FAULTS = 16  # kept for tests


class Planner:
    """One planner of any number: the holder of a replica's lease plans for that replica."""

    def __init__(
        self, cfg: PlannerConfig, bus: Bus, clock: Clock, tracing: Tracing, rng: Random
    ) -> None:
        self._cfg, self._bus, self._clock, self._tracing, self._rng = cfg, bus, clock, tracing, rng
        self.name = f"planner-{rng.getrandbits(48):012x}"
        self.metrics = Registry()
        self._counted = PlannerMetrics(self.metrics)
        self._absences = Absences(bus, clock)
        self._workers: dict[ReplicaId, tuple[Announce, float]] = {}
        self._planners: dict[ReplicaId, ReplicaPlanner] = {}
        self._stops: dict[ReplicaId, asyncio.Event] = {}
        # of each model, the replicas that compute prompts only, if their role is not fixed
        self._prefill: dict[str, frozenset[ReplicaId]] = {}
        # replicas whose planning failed, and until when they are left to other planners
        self._shunned: dict[ReplicaId, float] = {}
        # the newest faults of ours that ended a replica planner
        self.broken: deque[BaseException] = deque(maxlen=FAULTS)

    async def run(self, stop: asyncio.Event) -> None:
        announcements = await self._bus.subscribe(
            subjects.ANNOUNCEMENTS, Announce, self._on_announce
        )
        roles = await self._bus.subscribe(subjects.SCALING, ReplicasNeeded, self._on_needed)
        present = await be_present(self._bus, self.name)
        registered = await self._bus.serve(
            "planner", [], {"instance": self.name, "policy": self._cfg.policy}
        )
        log.info("planner.ready", planner=self.name, policy=self._cfg.policy)
        try:
            async with asyncio.TaskGroup() as tasks:
                look = tasks.create_task(self._look(tasks), name="planner.look")
                await stop.wait()
                look.cancel()
                for event in self._stops.values():
                    event.set()
        finally:
            await registered.stop()
            await announcements.stop()
            await roles.stop()
            await present.stop()

    def _on_announce(self, announce: Announce, call: Call) -> None:
        if call.subject != subjects.announce(announce.replica):
            return  # the sender is not the replica that it names
        if announce.replica not in self._workers and len(self._workers) >= MOST_REPLICAS:
            return
        self._workers[announce.replica] = (announce, self._clock.unix_s())
        planner = self._planners.get(announce.replica)
        if planner is not None:
            prefill = announce.replica in self._prefill.get(announce.model, ())
            role = Role.PREFILL if prefill else Role.BOTH
            planner.heard(announce, self._receivers(announce), role)

    def _on_needed(self, needed: ReplicasNeeded, _call: Call) -> None:
        if needed.model in self._prefill or len(self._prefill) < MODELS_LIMIT:
            self._prefill[needed.model] = frozenset(needed.prefill)

    def _receivers(self, leaving: Announce) -> int:
        """The number of replicas that could go on with the requests of this one, if it leaves."""
        if leaving.leaves_unix_s is None:
            return 0
        heard_unix_s = self._clock.unix_s() - self._cfg.lost_s
        return sum(
            other.model == leaving.model and not other.draining and at_unix_s > heard_unix_s
            for other, at_unix_s in self._workers.values()
        )

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Lease replicas that no planner has; the more this one holds, the later it tries."""
        while True:
            now = self._clock.unix_s()
            for replica, (announce, at) in sorted(self._workers.items()):
                if now - at > self._cfg.lost_s:
                    del self._workers[replica]
                    self._shunned.pop(replica, None)
                elif (
                    replica not in self._planners
                    and len(self._planners) < self._cfg.max_replicas
                    and now >= self._shunned.get(replica, now)
                ):
                    if self._planners:
                        await asyncio.sleep(
                            min(0.02 * len(self._planners), 0.2) * self._rng.random()
                        )
                    key = subjects.planner_lease(replica)
                    lease = Lease(self._bus.leases, key, self.name, self._absences)
                    try:
                        taken = await lease.acquire()
                    except BusError:
                        continue
                    if taken:
                        planner = self._planner_of(lease, announce)
                        if planner is None:
                            self._shunned[replica] = now + SHUN_S
                            continue
                        self._planners[replica] = planner
                        self._stops[replica] = asyncio.Event()
                        tasks.create_task(self._sit(planner), name=subjects.planner_lease(replica))
            await asyncio.sleep(LOOK_S)

    def _planner_of(self, lease: Lease, announce: Announce) -> ReplicaPlanner | None:
        """The replica's planner. None if this process cannot plan for it: the lease runs out."""
        try:
            return ReplicaPlanner(
                self._cfg,
                self.name,
                self._bus,
                self._clock,
                lease,
                announce,
                self._tracing,
                self._counted,
            )
        except ConfigError as error:
            log.error("seat.impossible", replica=announce.replica, error=str(error))
            return None

    async def _sit(self, planner: ReplicaPlanner) -> None:
        """Run a replica planner while its lease holds and its worker lives."""
        stop = self._stops[planner.replica]
        run = asyncio.ensure_future(planner.run())
        keep = asyncio.ensure_future(self._keep(planner, stop))
        try:
            await asyncio.wait((run, keep), return_when=asyncio.FIRST_COMPLETED)
        finally:
            run.cancel()
            keep.cancel()
            results = await asyncio.gather(run, keep, return_exceptions=True)
            del self._planners[planner.replica], self._stops[planner.replica]
            with suppress(BusError):  # the lease runs out by itself
                await planner.lease.release()
            log.info("seat.left", replica=planner.replica, epoch=planner.epoch)
        for result in results:
            self._judge(planner.replica, result)

    def _judge(self, replica: ReplicaId, result: BaseException | None) -> None:
        """Log why a replica planner ended. A fault ends no other; its replica waits for a while."""
        if isinstance(result, BaseExceptionGroup):
            # the bus failed it at its start: the next holder of the lease tries again
            result = result.split((BusError, PeerError))[1]
        if result is None or isinstance(result, (asyncio.CancelledError, StaleEpoch, BusError)):
            return
        log.error("seat.broken", replica=replica, exc_info=result)
        self.broken.append(result)
        self._shunned[replica] = self._clock.unix_s() + SHUN_S

    async def _keep(self, planner: ReplicaPlanner, stop: asyncio.Event) -> None:
        """Renew the lease until stopped, or it is lost or in doubt, or the worker is silent."""
        renewed = self._clock.unix_s()
        while not stop.is_set():
            try:
                async with asyncio.timeout(RENEW_S):
                    await stop.wait()
                return
            except TimeoutError:
                pass
            if self._clock.unix_s() - planner.heard_unix_s > self._cfg.lost_s:
                return
            asked = self._clock.unix_s()
            try:
                if not await planner.lease.renew():
                    return
                renewed = asked
            except BusError:
                if self._clock.unix_s() - renewed > LEASE_TTL_S - SAFETY_S:
                    return
