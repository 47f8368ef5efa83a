"""The workers of many replicas, at the bus: they answer holds and resyncs, and send the ack of each
iteration when its time is over.

Every replica decodes DECODES requests at a time; offers bring new ones, which take the places of
the oldest.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any

from msgspec.structs import replace

from loadgen.bench.stand_in import StandInWorker, announcement, decoding, offer
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.perf.profile_file import read
from shared.process.chores import Chores
from shared.schemas import (
    Announce,
    BatchPlan,
    Hold,
    OfferAccepted,
    OfferAnswer,
    PlanAck,
    Resync,
    ResyncPage,
)
from shared.vocabulary import ReplicaId, Slo

# by this profile an iteration of so many decodes takes 25 ms
PROFILE, DECODES, ITERATION_S = "h100-llama3-70b-tp4", 64, 0.025
OFFERS_PER_S = 2.0  # of each replica: a request decodes for 32 s, some 1,300 tokens
PROMPT_TOKENS = 500
SLO = Slo(ttft_s=2.0, tbt_s=0.1)
ANNOUNCE_S = 0.5
ANSWER_S = 2.0
POLL_S = 0.05
EVERY = ReplicaId(subjects.EVERY)


class StandInReplicas:
    """Replicas behind the same subscriptions, whose iterations last `stretch` times as long."""

    def __init__(
        self, number: int, stretch: float, bus: Bus, clock: Clock, rng: Random, chores: Chores
    ) -> None:
        self._bus, self._chores = bus, chores
        numbers = count(1)
        self._replicas = {
            name: _Replica(name, stretch, numbers, bus, clock, rng, chores)
            for name in (ReplicaId(f"r{n}") for n in range(1, number + 1))
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once every replica has run an iteration."""
        endpoints = [
            Endpoint("hold", subjects.hold(EVERY), Hold, self._on_hold),
            Endpoint("resync", subjects.resync(EVERY), Resync, self._on_resync),
        ]
        plans = await self._bus.subscribe(subjects.plan(EVERY), BatchPlan, self._on_plan)
        self._chores.listen(plans)
        self._chores.listen(await self._bus.serve("worker", endpoints, {}))
        for replica in self._replicas.values():
            self._begin(replica.announce())
            self._begin(replica.offer())
        while not all(replica.iterations for replica in self._replicas.values()):
            await asyncio.sleep(POLL_S)

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    def reset(self) -> None:
        for replica in self._replicas.values():
            replica.iterations = 0

    @property
    def iterations(self) -> int:
        """The iterations of all replicas since `reset`."""
        return sum(replica.iterations for replica in self._replicas.values())

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(self._chores.start(work, "bench"))

    def _on_plan(self, plan: BatchPlan, _: Call) -> None:
        self._replicas[plan.replica].on_plan(plan)

    def _on_hold(self, hold: Hold, call: Call) -> None:
        self._addressed(call).on_hold(hold, call)

    def _on_resync(self, resync: Resync, call: Call) -> None:
        self._addressed(call).on_resync(resync, call)

    def _addressed(self, call: Call) -> "_Replica":
        replica = subjects.replica_in(call.subject)
        assert replica is not None
        return self._replicas[ReplicaId(replica)]


class _Replica:
    """One replica."""

    def __init__(
        self,
        name: ReplicaId,
        stretch: float,
        numbers: Iterator[int],
        bus: Bus,
        clock: Clock,
        rng: Random,
        chores: Chores,
    ) -> None:
        """`numbers` of requests are those of all replicas."""
        self.iterations = 0
        self._name, self._bus, self._clock, self._rng, self._chores = name, bus, clock, rng, chores
        self._stretch, self._numbers = stretch, numbers
        file = read(PROFILE)
        slower_s = (stretch - 1.0) * ITERATION_S
        self._profile = replace(file, name="stretched", overhead_s=file.overhead_s + slower_s)
        self._worker = StandInWorker(clock.unix_s(), DECODES)
        self._epoch = self._sync = self._acked = 0
        self._next_seq = 1
        self._running = False
        self._resync: tuple[Resync, Call] | None = None

    async def announce(self) -> None:
        """Announce itself until cancelled."""
        while True:
            await self._bus.publish(subjects.announce(self._name), self._announcement())
            await asyncio.sleep(ANNOUNCE_S)

    async def offer(self) -> None:
        """Offer requests until cancelled."""
        while True:
            await asyncio.sleep(self._rng.expovariate(OFFERS_PER_S / self._stretch))
            if self._sync:
                self._chores.spawn(self._ask(), "bench.offer")

    async def _ask(self) -> None:
        asked = offer(next(self._numbers), self._slo, PROMPT_TOKENS, self._clock.unix_s())
        with suppress(BusError, PeerError):
            await self._bus.request(
                subjects.offer(self._name), asked, OfferAnswer, timeout_s=ANSWER_S
            )

    def on_plan(self, plan: BatchPlan) -> None:
        if (plan.epoch, plan.sync) != (self._epoch, self._sync):
            return
        self._next_seq = plan.seq + 1
        self._worker.receive(plan)
        if not self._running:
            self._run_next(self._clock.unix_s())

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
        now_unix_s = self._clock.unix_s()
        self._worker = StandInWorker(now_unix_s, DECODES, self._acked)
        for slot in range(DECODES):
            self._worker.hold(slot, 0)
        page = ResyncPage(
            announce=self._announcement(),
            next_seq=self._next_seq,
            ack_seq=self._acked,
            entries=[
                decoding(
                    slot,
                    offer(next(self._numbers), self._slo, PROMPT_TOKENS, now_unix_s),
                    self._rng.randint(1, 1000),
                )
                for slot in range(DECODES)
            ],
            more=False,
        )
        self._chores.spawn(call.reply(page), "bench.resync")

    def _run_next(self, now_unix_s: float) -> None:
        ack = self._worker.run_next(now_unix_s)
        self._running = True
        self.iterations += 1
        left_s = max(0.0, ack.ended_unix_s - self._clock.unix_s())
        asyncio.get_running_loop().call_later(left_s, self._end, ack)

    def _end(self, ack: PlanAck) -> None:
        self._acked = ack.ack_seq
        self._chores.spawn(self._bus.publish(subjects.acked(self._name), ack), "bench.ack")
        if self._resync is not None:
            self._running = False
            self._answer_resync()
        elif self._worker.has_plan:
            self._run_next(ack.ended_unix_s)
        else:
            self._running = False

    @property
    def _slo(self) -> Slo:
        """As loose as the engine is slow."""
        assert SLO.ttft_s is not None and SLO.tbt_s is not None
        return Slo(ttft_s=SLO.ttft_s * self._stretch, tbt_s=SLO.tbt_s * self._stretch)

    def _announcement(self) -> Announce:
        return replace(
            announcement(self._name, PROFILE, self._clock.unix_s()),
            epoch=self._epoch,
            ack_seq=self._acked,
            fitted=self._profile,
        )
