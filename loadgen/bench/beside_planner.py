"""The workers of many replicas, at the bus: they answer holds and resyncs, and send the ack of each
iteration when its time is over.

Every replica decodes DECODES requests at a time; offers bring new ones, which take the places of
the oldest.
"""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from random import Random

from loadgen.bench.beside import EVERY, Beside
from loadgen.bench.figure import Figure
from loadgen.bench.stand_in import StandInWorker, announcement, decoding, offer
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
    ResyncPage,
)
from shared.vocabulary import ReplicaId, Slo

REPLICAS, QUICK_REPLICAS = 64, 4
# by this profile an iteration of so many decodes takes 25 ms
PROFILE, DECODES, ITERATION_S = "h100-llama3-70b-tp4", 64, 0.025
OFFERS_PER_S = 2.0  # of each replica: a request decodes for 32 s, some 1,300 tokens
PROMPT_TOKENS = 500
SLO = Slo(ttft_s=2.0, tbt_s=0.1)
ANNOUNCE_S = 0.5
ANSWER_S = 2.0
POLL_S = 0.05


class BesidePlanner(Beside):
    """Replicas behind the same subscriptions. A unit is an iteration."""

    async def load(self, quick: bool) -> None:
        number = QUICK_REPLICAS if quick else REPLICAS
        self.note = f"{number} replicas"
        numbers = count(1)
        self._replicas = {
            name: Replica(name, numbers, self._bus, self._clock, self._rng, self._chores)
            for name in (ReplicaId(f"r{n}") for n in range(1, number + 1))
        }
        endpoints = [
            Endpoint("hold", subjects.hold(EVERY), Hold, self._on_hold),
            Endpoint("resync", subjects.resync(EVERY), Resync, self._on_resync),
        ]
        plans = await self._bus.subscribe(subjects.plan(EVERY), BatchPlan, self._on_plan)
        self._chores.listen(plans)
        self._chores.listen(await self._bus.serve("worker", endpoints, {}))
        for replica in self._replicas.values():
            self._start(replica.announce())
            self._start(replica.offer())
        while not all(replica.iterations for replica in self._replicas.values()):
            await asyncio.sleep(POLL_S)

    def reset(self) -> None:
        for replica in self._replicas.values():
            replica.iterations, replica.idle_s, replica.total_s = 0, 0.0, 0.0

    @property
    def done(self) -> int:
        return sum(replica.iterations for replica in self._replicas.values())

    def figures(self, part: str, prefix: str) -> list[Figure]:
        idle_s = sum(replica.idle_s for replica in self._replicas.values())
        total_s = sum(replica.total_s for replica in self._replicas.values())
        share = idle_s / total_s if total_s else None
        return [Figure(part, f"{prefix}engines wait for a plan", share, "%")]

    def _on_plan(self, plan: BatchPlan, _: Call) -> None:
        self._replicas[plan.replica].on_plan(plan)

    def _on_hold(self, hold: Hold, call: Call) -> None:
        self._addressed(call).on_hold(hold, call)

    def _on_resync(self, resync: Resync, call: Call) -> None:
        self._addressed(call).on_resync(resync, call)

    def _addressed(self, call: Call) -> "Replica":
        replica = subjects.replica_in(call.subject)
        assert replica is not None
        return self._replicas[ReplicaId(replica)]


class Replica:
    """One replica. Its engine has waited `idle_s` of `total_s` for plans."""

    def __init__(
        self,
        name: ReplicaId,
        numbers: Iterator[int],
        bus: Bus,
        clock: Clock,
        rng: Random,
        chores: Chores,
    ) -> None:
        """`numbers` of requests are those of all replicas."""
        self.iterations, self.idle_s, self.total_s = 0, 0.0, 0.0
        self._name, self._bus, self._clock, self._rng, self._chores = name, bus, clock, rng, chores
        self._numbers = numbers
        self._incarnation = f"i{rng.getrandbits(32):08x}"
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
            await asyncio.sleep(self._rng.expovariate(OFFERS_PER_S))
            if self._sync:
                self._chores.spawn(self._ask(), "bench.offer")

    async def _ask(self) -> None:
        subject = subjects.offer(self._name)
        with suppress(BusError, PeerError):
            await self._bus.request(subject, self._new_offer(), OfferAnswer, timeout_s=ANSWER_S)

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
        self._worker = StandInWorker(self._clock.unix_s(), DECODES, self._acked)
        for slot in range(DECODES):
            self._worker.hold(slot, 0)
        page = ResyncPage(
            announce=self._announcement(),
            next_seq=self._next_seq,
            ack_seq=self._acked,
            entries=[
                decoding(slot, self._new_offer(), self._rng.randint(1, 1000))
                for slot in range(DECODES)
            ],
            more=False,
        )
        self._chores.spawn(call.reply(page), "bench.resync")

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

    def _announcement(self) -> Announce:
        return announcement(
            self._name,
            PROFILE,
            self._clock.unix_s(),
            incarnation=self._incarnation,
            epoch=self._epoch,
            ack_seq=self._acked,
        )

    def _new_offer(self) -> Offer:
        return offer(next(self._numbers), SLO, PROMPT_TOKENS, self._clock.unix_s())
