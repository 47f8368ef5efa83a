"""Simulates a fleet: the cores that run live, over any number of replicas, in virtual time, with a
profile as the GPU.

No message is lost here, and no process dies but workers that are told to (tests/fleet/protocol
simulates all else). A run is deterministic: the same arguments give the same result to the last
digit, wall time apart.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from msgspec.structs import replace

from loadgen.simulator.deployment import Deployment, Outage
from loadgen.simulator.elastic.law import of_roles
from loadgen.simulator.elastic.scaler import Scaler
from loadgen.simulator.misjudged import MisjudgedLengths
from loadgen.simulator.served import Served
from loadgen.simulator.tasks import SimulatedTasks
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.traffic import Traffic, key_of, stored_as
from loadgen.simulator.virtual_fleet import VirtualFleet
from loadgen.simulator.virtual_replica import VirtualReplica
from shared.core.record.verdict import GOOD_ENDS
from shared.errors import ConfigError
from shared.policy import registry
from shared.policy.acceptance import Acceptance
from shared.policy.seam import Policy
from shared.prefix import CHAIN_TOKENS, Chain, chain_of_pieces, prefix_of
from shared.schemas import Announce, Record, Verdict
from shared.vocabulary import ReplicaId, RequestKey, Role, Slo

STALL_S = 3600.0  # a run without an iteration for this time after the last arrival is stuck
# calls of the timeline between two reports of the progress, and between two looks whether there is
# any: some thousand calls take a second
TOLD_CALLS, WATCH_CALLS = 0x100, 0x10000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The extent of a run, and the results that it keeps.

    keep_times: keep the instant of every token.
    check_every: events between checks of all books; 0: no checks.
    horizon_s: the instant at which the run ends, whatever is left.
    most_missed: the run stops once more requests than this have missed their SLO: a caller that
        only asks whether a rate is too high needs no more. Rounds that are never sent have missed.
    leaps: alike iterations run as one where control takes no time (virtual_replica.py); False: each
        runs by itself.
    accounts: keep the account of each request's time, by which it can be explained, and the records
        of requests; without leaps.
    progress: called several times a second with the virtual time and the number of requests ended.
    """

    keep_times: bool = False
    check_every: int = 0
    horizon_s: float | None = None
    most_missed: int | None = None
    leaps: bool = True
    accounts: bool = False
    progress: Callable[[float, int], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The lists run along the requests of the traffic. A verdict is None where the horizon came
    first, and for the rounds after one that failed. Times are there only if they were asked for.
    """

    verdicts: Sequence[Verdict | None]
    slos: Sequence[Slo]
    token_unix_s: Sequence[Sequence[float]] | None
    iterations: int
    tokens: int
    preempted: int  # times a request's KV was given up
    forced_preemptions: int  # of these, by the core because nothing else fitted
    mispredicted_entries: int
    offloaded: int  # times a request was given to another replica, to be served sooner there
    busy_s: float  # engine seconds, all replicas
    busiest_s: float  # of these, of the replica that has most
    idle_s: float  # engines waited for a plan while they held work
    drafted: int  # draft tokens verified
    accepted: int  # of these
    verifications: int  # entries that had drafts verified, over all iterations
    simulated_s: float
    wall_s: float
    events: int
    moved: int = 0  # times a request lost its replica, and went on elsewhere
    drained: int = 0  # times a request was handed on by a replica that left
    replica_s: float = 0.0  # the seconds of all replicas, those in which they warm up included
    counts: Sequence[tuple[float, int]] = ()  # (s, replicas) with `scaling`, at each change
    # [requests] with `accounts`: the records of those that ended
    records: Sequence[Record | None] = ()
    stopped: bool = False  # early: more than `most_missed` had missed

    @property
    def relegated(self) -> int:
        return sum(verdict is not None and verdict.relegated for verdict in self.verdicts)

    @property
    def finished(self) -> int:
        return sum(verdict is not None and verdict.output_tokens > 0 for verdict in self.verdicts)

    @property
    def met_fraction(self) -> float:
        """The fraction of all requests that met their SLO; unfinished ones count as missed."""
        return sum(verdict is not None and verdict.slo_met for verdict in self.verdicts) / max(
            1, len(self.verdicts)
        )


def simulate(
    traffic: Traffic, deployment: Deployment, options: RunOptions | None = None
) -> SimulationResult:
    """Serve this traffic until all requests have ended, or until an option ends the run.

    Raises: ConfigError for an unknown policy, setting or profile, an impossible draft or
        acceptance; AssertionError where an invariant breaks; RuntimeError on a stall.
    """
    return Simulation(traffic, deployment, options or RunOptions()).run()


class Simulation:
    """One run, from the first arrival to the result."""

    def __init__(self, traffic: Traffic, deployment: Deployment, options: RunOptions) -> None:
        self._began_s = time.perf_counter()
        self._traffic, self._options = traffic, options
        self._timeline = Timeline(traffic.begin_s)
        self._served = {each.name: Served.of(each, deployment) for each in deployment.served}
        self._most_tokens = traffic.most_tokens
        self._keys = [key_of(request) for request in traffic.requests]
        self._slos = [traffic.slo(request) for request in traffic.requests]
        self._verdicts: dict[RequestKey, Verdict] = {}
        self._ended: dict[RequestKey, Record] = {}  # with `accounts`
        # where no prompt begins like another, nobody looks
        self._alike = any(request.pieces for request in traffic.requests)
        self._moves = deployment.link_gbit_s > 0
        self._missed = 0
        self._tasks = SimulatedTasks()
        most = options.most_missed
        self._most_missed = len(self._keys) if most is None else most
        self._horizon_s = math.inf if options.horizon_s is None else options.horizon_s
        # the iterations at the last look, and when they were last seen to grow
        self._iterations, self._moved_s = 0, self._timeline.now_s
        self._start(deployment)

    def _start(self, deployment: Deployment) -> None:
        """Every replica is there and known; then the first arrival is scheduled."""
        acceptance = Acceptance(deployment.acceptance)
        if any(each.replicas < 1 for each in deployment.served):
            raise ConfigError("there must be at least one replica")
        # each replica's model, and its number among the replicas of that
        of = [(self._served[m.name], n) for m in deployment.served for n in range(m.replicas)]
        policy, settings, latency = deployment.policy, deployment.settings, deployment.latency
        pools = registry.make(policy, settings).declared.pools
        self._fleet = VirtualFleet(
            self._timeline,
            latency,
            (deployment.router or partial(registry.router, policy, settings))(),
            Random(f"{self._traffic.seed}/router"),
            Random(f"{self._traffic.seed}/latency"),
            self._end,
            admission_settings=deployment.admission,
            relegation_settings=deployment.relegation,
            keep_times=self._options.keep_times,
            prefixes_late_s=deployment.prefixes_late_s,
        )

        def made(i: int, incarnation: int = 1) -> VirtualReplica:
            life = "" if incarnation == 1 else f"/{incarnation}"
            served, nth = of[i] if i < len(of) else (of[0][0], i)  # of one model, where they come
            return VirtualReplica(
                self._announce(
                    i, served, pools[nth % len(pools)], str(incarnation), deployment.role_of(nth)
                ),
                self._policy_of(deployment),
                served.profile,
                served.draft,
                acceptance,
                self._timeline,
                latency,
                Random(f"{self._traffic.seed}/latency/{i}{life}"),
                self._fleet,
                hand_back=deployment.hand_back,
                leaps=self._options.leaps,
                accounts=self._options.accounts,
                batch_s=served.batch_s,
                engine_draft=served.engine_draft,
            )

        self._alive = [made(i) for i in range(len(of))]
        self._replicas = list(self._alive)  # those that died, too
        self._dead_until_s: dict[int, float] = {}
        self._fleet.start(self._replicas)
        in_order = sorted(deployment.outages, key=lambda outage: outage.from_s)
        for incarnation, outage in enumerate(in_order, start=2):
            self._schedule(outage, made, incarnation)
        self._scaler: Scaler | None = None
        scaling = deployment.scaling
        if scaling is None and Role.AUTO in deployment.roles:
            scaling = of_roles(len(of))
        if scaling is not None:
            self._scaler = Scaler(
                scaling,
                self._timeline,
                self._fleet,
                self._alive,
                lambda: self._further(made(len(self._replicas))),
            )
        self._arrivals = Arrivals(self._traffic, self._keys, self._timeline, self._receive)

    def _further(self, replica: VirtualReplica) -> VirtualReplica:
        self._replicas.append(replica)
        return replica

    def _schedule(
        self, outage: Outage, made: Callable[[int, int], VirtualReplica], incarnation: int
    ) -> None:
        """Schedule a death. Raises ConfigError for no such replica, or one that is dead already."""
        replica, from_s, for_s = outage
        if not 0 <= replica < len(self._replicas) or from_s < 0 or for_s <= 0:
            raise ConfigError(f"{outage}: there is no such replica, or no such time")
        if from_s < self._dead_until_s.get(replica, 0.0):
            raise ConfigError(f"{outage}: the replica is dead already")
        self._dead_until_s[replica] = from_s + for_s

        def back() -> None:
            self._replicas.append(made(replica, incarnation))
            self._alive[replica] = self._replicas[-1]
            self._fleet.start(self._replicas[-1:])

        def gone() -> None:
            self._fleet.fail(self._alive[replica])

        self._timeline.at(from_s, gone)
        if math.isfinite(for_s):
            self._timeline.at(from_s + for_s, back)

    def _policy_of(self, deployment: Deployment) -> Policy:
        policy = registry.make(deployment.policy, deployment.settings)
        if deployment.length_times == 1.0:
            return policy
        return MisjudgedLengths(policy, deployment.length_times)

    def _announce(
        self, i: int, served: Served, pool: str, incarnation: str, role: Role
    ) -> Announce:
        facts = served.facts
        return Announce(
            replica=(name := ReplicaId(f"r{i + 1:02}")),
            incarnation=incarnation,
            at_unix_s=self._timeline.now_s,
            model=served.announced,
            engine="virtual",
            profile=served.profile_name,
            pool=pool,
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
            max_slots=facts.max_slots,
            epoch=0,
            longest_chain=served.longest_chain,
            host_kv_blocks=facts.host_kv_tokens // facts.block_tokens,
            kv_load_s=served.kv_load_s,
            role=role,
            kv_address=name if served.kv_move_s else "",
            kv_move_s=served.kv_move_s,
        )

    # ------------------------------------------------------------ arrivals and ends

    def _receive(self, i: int) -> None:
        """Request i arrives."""
        planned, only = self._traffic.requests[i], self._served.get("")
        served = only or self._served[planned.model]
        record, body = stored_as(
            planned,
            self._traffic.tiers,
            served.profile,
            served.facts.context_tokens,
            self._most_tokens,
            self._timeline.now_s,
            model=served.name,
        )
        record = self._tasks.received(record)
        self._slos[i] = record.judged_slo
        if self._scaler is not None:
            self._scaler.law.arrived(record)
        chain: Chain = ()
        if self._alike or self._moves:
            chain = chain_of_pieces(planned.text)
        if self._alike:
            prompt = chain[: record.prompt_tokens // CHAIN_TOKENS]
            record = replace(record, prefix=prefix_of(prompt))
        self._fleet.receive(record, body, chain)

    def _end(self, record: Record) -> None:
        """A request has ended, with this record."""
        key, verdict = record.key, record.verdict
        assert verdict is not None and key not in self._verdicts, f"{key} ended twice"
        self._verdicts[key] = verdict
        if self._options.accounts:
            self._ended[key] = record
        self._missed += not verdict.slo_met
        self._tasks.ended(record)
        if self._scaler is not None:
            self._scaler.law.ended(record)
        self._arrivals.ended(key, well=verdict.finish_reason in GOOD_ENDS)

    # ------------------------------------------------------------ the loop

    def run(self) -> SimulationResult:
        """All of the run; called once."""
        timeline, fleet, check_every = self._timeline, self._fleet, self._options.check_every
        while self._unended and not self._stopped and timeline.next_s <= self._horizon_s:
            timeline.step()
            if check_every and timeline.calls % check_every == 0:
                fleet.check()
            if not timeline.calls % TOLD_CALLS:
                self._tell()
        if self._unended:  # the iterations done by now count
            if self._options.horizon_s is not None and not self._stopped:
                timeline.now_s = max(timeline.now_s, self._horizon_s)
            for replica in self._replicas:
                replica.settle()
        if check_every:
            fleet.check()
        return self._result()

    @property
    def _unended(self) -> bool:
        """Some request has not ended, and may still."""
        return len(self._verdicts) + self._arrivals.unsent < len(self._keys)

    @property
    def _stopped(self) -> bool:
        return self._missed + self._arrivals.unsent > self._most_missed

    def _tell(self) -> None:
        """Report the progress; now and then check that the run has not stalled."""
        if self._options.progress is not None:
            self._options.progress(self._timeline.now_s, len(self._verdicts))
        if not self._timeline.calls % WATCH_CALLS:
            self._watch()

    def _watch(self) -> None:
        """Raises RuntimeError where there has been no progress for STALL_S."""
        now_s = self._timeline.now_s
        iterations = sum(replica.worker.counters.iterations for replica in self._replicas)
        if iterations != self._iterations or self._arrivals.waiting:
            self._moved_s, self._iterations = now_s, iterations
        elif now_s - self._moved_s > STALL_S:
            raise RuntimeError(
                f"nothing has moved since {self._moved_s:.1f} s, and "
                f"{len(self._keys) - len(self._verdicts)} requests have not ended"
            )

    def _result(self) -> SimulationResult:
        scaler = self._scaler
        if scaler is not None:
            scaler.settle()
        seconds = self._timeline.now_s - self._traffic.begin_s
        workers = [replica.worker.counters for replica in self._replicas]
        cores = [replica.core.counters for replica in self._replicas]
        times = self._fleet.times if self._options.keep_times else None
        return SimulationResult(
            verdicts=[self._verdicts.get(key) for key in self._keys],
            slos=self._slos,
            token_unix_s=None
            if times is None
            else [times.get(key, array("d")) for key in self._keys],
            iterations=sum(c.iterations for c in workers),
            tokens=sum(c.tokens for c in workers),
            preempted=sum(replica.preempted for replica in self._replicas),
            forced_preemptions=sum(c.forced_preemptions for c in cores),
            mispredicted_entries=sum(c.mispredicted_entries for c in cores),
            offloaded=self._fleet.offloaded,
            moved=self._fleet.moved,
            drained=self._fleet.drained,
            replica_s=len(self._alive) * seconds if scaler is None else scaler.replica_s,
            counts=() if scaler is None else scaler.counts,
            busy_s=sum(c.exec_s for c in workers),
            busiest_s=max(c.exec_s for c in workers),
            idle_s=sum(c.idle_s for c in workers),
            drafted=sum(c.drafted for c in workers),
            accepted=sum(c.accepted for c in workers),
            verifications=sum(c.verifications for c in workers),
            simulated_s=seconds,
            wall_s=time.perf_counter() - self._began_s,
            events=self._timeline.calls,
            records=[self._ended.get(key) for key in self._keys] if self._options.accounts else (),
            stopped=self._stopped,
        )


class Arrivals:
    """The arrivals of a run on its timeline. A round of a session that is `after` another arrives
    when that one has ended well and its pause is over; after one that failed it is never sent.
    """

    def __init__(
        self,
        traffic: Traffic,
        keys: Sequence[RequestKey],
        timeline: Timeline,
        receive: Callable[[int], None],
    ) -> None:
        self._requests, self._keys = traffic.requests, keys
        self._timeline, self._receive = timeline, receive
        index = {request.number: i for i, request in enumerate(self._requests)}
        self._next_rounds = {  # by the key of the round before
            keys[index[request.after]]: i
            for i, request in enumerate(self._requests)
            if request.after is not None
        }
        self._independent = deque(
            i for i, request in enumerate(self._requests) if request.after is None
        )
        self.unsent = 0  # rounds that never will be: one before them failed
        if self._requests:
            timeline.at(traffic.begin_s, self._arrive)

    @property
    def waiting(self) -> bool:
        """Some request that waits for no other has not arrived yet."""
        return bool(self._independent)

    def _arrive(self) -> None:
        """Each arrival schedules the next, so that a long trace is not a long heap."""
        i = self._independent.popleft()
        if self._independent:
            self._timeline.at(self._requests[self._independent[0]].arrival_s, self._arrive)
        self._receive(i)

    def ended(self, key: RequestKey, *, well: bool) -> None:
        """The request has ended: schedule its session's next round, or none of those to come."""
        i = self._next_rounds.pop(key, None)
        if i is None:
            return
        if well:
            self._timeline.after(self._requests[i].pause_s, self._receive, i)
            return
        while i is not None:
            self.unsent += 1
            i = self._next_rounds.pop(self._keys[i], None)
