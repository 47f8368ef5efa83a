"""Stand-ins for the workers of many replicas, in one process, at the bus: they answer holds and
resyncs, and send the ack of each iteration when its time is over.

Every replica decodes DECODES requests at a time; offers bring new ones, which take the places of
the oldest.
"""

import asyncio
from contextlib import suppress
from random import Random
from types import TracebackType
from typing import NamedTuple, Self

from loadgen.bench.stand_in_worker import StandInWorker
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.process.chores import Chores
from shared.schemas import (
    Announce,
    BatchPlan,
    Hold,
    Offer,
    OfferAccepted,
    OfferAnswer,
    PlanAck,
    Resync,
    ResyncEntry,
    ResyncPage,
)
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

# by this profile an iteration of so many decodes takes 25 ms
PROFILE, DECODES, ITERATION_S = "h100-llama3-70b-tp4", 64, 0.025
OFFERS_PER_S = 2.0  # of each replica: a request decodes for 32 s, some 1,300 tokens
PROMPT_TOKENS, LONGEST_OUTPUT = 500, 4000
SLO = Slo(ttft_s=2.0, tbt_s=0.1)
ANNOUNCE_S = 0.5
ANSWER_S = 2.0
POLL_S = 0.05
EVERY = ReplicaId(subjects.EVERY)


class Waits(NamedTuple):
    """The iterations of all engines together, and their waits for plans."""

    iterations: int
    resyncs: int
    idle_s: float
    total_s: float

    @property
    def share(self) -> float:
        return self.idle_s / self.total_s if self.total_s else 1.0


class StandInReplica:
    """One replica. Its engine has waited `idle_s` of `total_s` for plans since `reset`."""

    def __init__(
        self, name: ReplicaId, bus: Bus, clock: Clock, rng: Random, chores: Chores
    ) -> None:
        self.reset()
        self._name, self._bus, self._clock, self._rng, self._chores = name, bus, clock, rng, chores
        self._incarnation = f"i{rng.getrandbits(32):08x}"
        self._worker = StandInWorker(clock.unix_s(), DECODES)
        self._epoch = self._sync = self._acked = self._requests = 0
        self._next_seq = 1
        self._running = False
        self._resync: tuple[Resync, Call] | None = None

    def reset(self) -> None:
        self.idle_s = self.total_s = 0.0
        self.iterations = self.resyncs = 0

    async def announce(self) -> None:
        """Announce itself until cancelled."""
        while True:
            await self._bus.publish(subjects.announce(self._name), self._announcement())
            await asyncio.sleep(ANNOUNCE_S)

    async def offer(self) -> None:
        """Offer requests until cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(OFFERS_PER_S))
            if self._sync:
                self._chores.spawn(self._ask(self._new_offer()), "bench.offer")

    async def _ask(self, offer: Offer) -> None:
        with suppress(BusError, PeerError):
            await self._bus.request(
                subjects.offer(self._name), offer, OfferAnswer, timeout_s=ANSWER_S
            )

    # ------------------------------------------------------------ what the planner sends

    def on_plan(self, plan: BatchPlan) -> None:
        if (plan.epoch, plan.sync) != (self._epoch, self._sync):
            return
        self._next_seq = plan.seq + 1
        self._worker.receive(plan)
        if not self._running:
            self._begin(self._clock.unix_s())

    def on_hold(self, hold: Hold, call: Call) -> None:
        self._worker.hold(hold.slot, PROMPT_TOKENS)
        self._chores.spawn(call.reply(OfferAccepted()), "bench.hold")

    def on_resync(self, resync: Resync, call: Call) -> None:
        """Answered between two iterations: with requests that all decode, as after a start."""
        self._resync = (resync, call)
        if not self._running:
            self._answer_resync()

    def _answer_resync(self) -> None:
        assert self._resync is not None
        (resync, call), self._resync = self._resync, None
        self._epoch, self._sync = resync.epoch, resync.sync
        self.resyncs += 1
        self._worker = StandInWorker(self._clock.unix_s(), DECODES)
        self._worker.ack_seq = self._acked
        entries = []
        for slot in range(DECODES):
            generated = self._rng.randint(1, 1000)
            offer = self._new_offer()
            entries.append(
                ResyncEntry(
                    slot=slot,
                    offer=offer,
                    computed_tokens=offer.prompt_tokens + generated - 1,
                    generated_tokens=generated,
                )
            )
            self._worker.hold(slot, 0)
        page = ResyncPage(
            announce=self._announcement(),
            next_seq=self._next_seq,
            ack_seq=self._acked,
            entries=entries,
            more=False,
        )
        self._chores.spawn(call.reply(page), "bench.resync")

    # ------------------------------------------------------------ iterations

    def _begin(self, now_unix_s: float) -> None:
        """Run the next plan. One that came before the last iteration's end did not have to wait
        until this process had its turn.
        """
        ended_unix_s = self._worker.ended_unix_s
        ack = self._worker.run_next(now_unix_s if not self._running else 0.0)
        self._running = True
        self.iterations += 1
        self.idle_s += ack.idle_s
        self.total_s += ack.ended_unix_s - ended_unix_s
        left_s = max(0.0, ack.ended_unix_s - self._clock.unix_s())
        asyncio.get_running_loop().call_later(left_s, self._end, ack)

    def _end(self, ack: PlanAck) -> None:
        self._acked = ack.ack_seq
        self._chores.spawn(self._bus.publish(subjects.acked(self._name), ack), "bench.ack")
        if self._resync is not None:
            self._running = False
            self._answer_resync()
        elif self._worker.has_plan:
            self._begin(ack.ended_unix_s)
        else:
            self._running = False

    # ------------------------------------------------------------ facts

    def _announcement(self) -> Announce:
        return Announce(
            replica=self._name,
            incarnation=self._incarnation,
            at_unix_s=self._clock.unix_s(),
            model="m",
            engine="sim",
            profile=PROFILE,
            pool="",
            kv_blocks=80_000,
            block_tokens=16,
            context_tokens=8192,
            max_slots=4096,
            epoch=self._epoch,
            ack_seq=self._acked,
        )

    def _new_offer(self) -> Offer:
        self._requests += 1
        now_unix_s = self._clock.unix_s()
        return Offer(
            key=RequestKey(f"bench.{self._name}-{self._requests}"),
            attempt=1,
            service_class=ServiceClass.STANDARD,
            tier="t",
            slo=SLO,
            importance=1.0,
            application=f"a{self._requests % 4}",
            arrived_unix_s=now_unix_s,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=LONGEST_OUTPUT,
            next_due_unix_s=SLO.first_due_unix_s(now_unix_s),
        )


class StandInReplicas:
    """Any number of replicas behind the same subscriptions; use it as an async context."""

    def __init__(self, bus: Bus, clock: Clock, rng: Random) -> None:
        self._bus, self._clock, self._rng = bus, clock, rng
        self._chores = Chores()
        self._tasks: list[asyncio.Task[None]] = []
        self._replicas: dict[ReplicaId, StandInReplica] = {}

    async def __aenter__(self) -> Self:
        await self._chores.__aenter__()
        bus, chores = self._bus, self._chores
        chores.listen(await bus.subscribe(subjects.plan(EVERY), BatchPlan, self._on_plan))
        endpoints = [
            Endpoint("hold", subjects.hold(EVERY), Hold, self._on_hold),
            Endpoint("resync", subjects.resync(EVERY), Resync, self._on_resync),
        ]
        chores.listen(await bus.serve("worker", endpoints, {}))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._chores.__aexit__(kind, error, trace)

    async def grow(self, count: int) -> None:
        """Add replicas until there are so many, and return once each runs iterations."""
        for n in range(len(self._replicas) + 1, count + 1):
            name = ReplicaId(f"r{n}")
            replica = StandInReplica(name, self._bus, self._clock, self._rng, self._chores)
            self._replicas[name] = replica
            self._tasks += [
                self._chores.start(replica.announce(), "bench.announce"),
                self._chores.start(replica.offer(), "bench.offer"),
            ]
        while not all(replica.iterations for replica in self._replicas.values()):
            await asyncio.sleep(POLL_S)

    async def watch(self, seconds: float) -> Waits:
        """The iterations and waits of the next `seconds`."""
        for replica in self._replicas.values():
            replica.reset()
        await asyncio.sleep(seconds)
        replicas = self._replicas.values()
        return Waits(
            iterations=sum(replica.iterations for replica in replicas),
            resyncs=sum(replica.resyncs for replica in replicas),
            idle_s=sum(replica.idle_s for replica in replicas),
            total_s=sum(replica.total_s for replica in replicas),
        )

    def _on_plan(self, plan: BatchPlan, _: Call) -> None:
        self._replicas[plan.replica].on_plan(plan)

    def _on_hold(self, hold: Hold, call: Call) -> None:
        self._addressed(call).on_hold(hold, call)

    def _on_resync(self, resync: Resync, call: Call) -> None:
        self._addressed(call).on_resync(resync, call)

    def _addressed(self, call: Call) -> StandInReplica:
        replica = subjects.replica_in(call.subject)
        assert replica is not None
        return self._replicas[ReplicaId(replica)]
