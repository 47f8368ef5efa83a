"""The time of a planning step, of the digestion of an ack and of the answer to an offer, for one
replica's core without a bus.

The replica is in a steady state: 256 requests decode and 64 wait at every step, and each request
that ends is replaced. `slackline` is measured with a long queue as well.
"""

import gc
import time
from random import Random
from typing import NamedTuple

from loadgen.bench.figure import Figure, spread
from loadgen.bench.stand_in_worker import StandInWorker
from shared.bus import codec
from shared.core.replica.events import (
    Acked,
    HoldDone,
    Offered,
    ReplicaAction,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.schemas import Announce, Offer, OfferAccepted, ResyncEntry
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

PART = "planning step"
AIM_P50_S, AIM_P99_S = 0.0003, 0.001
AIM_LONG_P99_S, AIM_OFFER_S = 0.002, 0.0003
DECODES, WAITING, MANY_WAITING = 256, 64, 2_000
WARM_UP_STEPS = 60
PROFILE = "a100-llama3-8b"
# With so much KV no request is preempted.
KV_BLOCKS, BLOCK_TOKENS, CONTEXT_TOKENS = 80_000, 16, 8192
# Interactive, summary and batch requests in turn, so that the queue has both kinds of deadline.
SLOS = (Slo(ttft_s=60.0, tbt_s=0.1), Slo(ttlt_s=600.0), Slo(ttlt_s=86_400.0))
REPLICA, INCARNATION = ReplicaId("r1"), "i1"


class Steps(NamedTuple):
    """The measurements of all steps, in seconds of wall clock and of this thread's CPU.

    Other processes do not lengthen CPU time.
    """

    plan_s: list[float]
    plan_cpu_s: list[float]
    ack_s: list[float]
    offer_s: list[float]  # the answer to one offer without a TTLT, which may be declined
    plan_bytes: list[int]
    entries: list[int]


def measure(steps: int, seed: int) -> list[Figure]:
    figures = []
    for policy in ("qoserve", "slackline"):
        seen = Bench(Random(seed), policy).run(steps)
        bytes_mean = sum(seen.plan_bytes) / len(seen.plan_bytes)
        entries = sum(seen.entries) / len(seen.entries)
        load = f"{policy}, {DECODES} decodes and {WAITING} waiting, encoded"
        figures += [
            *spread(PART, load, seen.plan_s, "ms", p50=AIM_P50_S, p99=AIM_P99_S),
            *spread(PART, f"{policy}, the same, CPU of the thread", seen.plan_cpu_s, "ms"),
            *spread(PART, f"{policy}, digesting its ack", seen.ack_s, "ms"),
            *spread(
                PART,
                f"{policy}, answering an offer with a TTFT",
                seen.offer_s,
                "ms",
                p50=AIM_OFFER_S,
            ),
            Figure(
                part=PART,
                name=f"{policy}, size of a plan",
                value=bytes_mean / 1e3,
                unit="",
                note=f"kB; {entries:.0f} entries",
            ),
        ]
    seen = Bench(Random(seed), "slackline", MANY_WAITING).run(max(steps // 10, 1))
    load = f"slackline, {DECODES} decodes and {MANY_WAITING} waiting, encoded"
    return figures + spread(PART, load, seen.plan_s, "ms", p99=AIM_LONG_P99_S)


class Bench:
    """The core of one replica and a stand-in for its worker, in virtual time."""

    def __init__(self, rng: Random, policy: str = "qoserve", waiting: int = WAITING) -> None:
        self._rng, self._waiting = rng, waiting
        # a long queue is one of summaries and batches: nobody waits a minute for a first token
        self._slos = SLOS if waiting == WAITING else SLOS[1:]
        self._offer_s: list[float] = []
        self._now_unix_s = 1_000_000.0
        self._core = ReplicaCore(registry.make(policy), profiles.load(PROFILE), epoch=1)
        self._worker = StandInWorker(self._now_unix_s, DECODES)
        self._offers = 0
        self._synchronise()
        self._refill()

    def run(self, steps: int) -> Steps:
        seen = Steps([], [], [], [], [], [])
        gc.collect()
        for step in range(-WARM_UP_STEPS, steps):
            wake = self._core.wake_at_unix_s()
            assert wake is not None, "there is always work"
            self._now_unix_s = max(self._now_unix_s, wake)
            began_cpu = time.thread_time()  # takes 20 us itself, so it is outside the wall time
            began = time.perf_counter()
            actions = self._core.handle(Tick(), now_unix_s=self._now_unix_s)
            encoded = [
                codec.encode(action.plan, json=False)
                for action in actions
                if isinstance(action, SendPlan)
            ]
            took, took_cpu = time.perf_counter() - began, time.thread_time() - began_cpu
            self._carry_out(actions)
            ack = self._worker.run_next()
            self._now_unix_s = ack.ended_unix_s
            began = time.perf_counter()
            actions = self._core.handle(Acked(ack), now_unix_s=self._now_unix_s)
            ack_s = time.perf_counter() - began
            self._carry_out(actions)
            self._refill()
            if step >= 0 and len(encoded) == 1:
                seen.plan_s.append(took)
                seen.plan_cpu_s.append(took_cpu)
                seen.ack_s.append(ack_s)
                seen.plan_bytes.append(len(encoded[0]))
                seen.entries.append(len(ack.slots) // 4)
        seen.offer_s.extend(self._offer_s)
        self._core.check()
        return seen

    def _synchronise(self) -> None:
        """Gives the core and the worker DECODES requests that decode already."""
        announce = Announce(
            replica=REPLICA,
            incarnation=INCARNATION,
            at_unix_s=self._now_unix_s,
            model="m",
            engine="sim",
            profile=PROFILE,
            pool="",
            kv_blocks=KV_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            context_tokens=CONTEXT_TOKENS,
            max_slots=4096,
            epoch=0,
        )
        entries = []
        for slot in range(DECODES):
            offer = self._offer()
            generated = self._rng.randint(1, 400)
            entries.append(
                ResyncEntry(
                    slot=slot,
                    offer=offer,
                    computed_tokens=offer.prompt_tokens + generated - 1,
                    generated_tokens=generated,
                )
            )
            self._worker.hold(slot, 0)
        self._feed(Synced(announce, sync=1, next_seq=1, ack_seq=0, entries=entries))

    def _feed(self, event: Synced | Offered | HoldDone) -> None:
        self._carry_out(self._core.handle(event, now_unix_s=self._now_unix_s))

    def _carry_out(self, actions: list[ReplicaAction]) -> None:
        for action in actions:
            if isinstance(action, SendPlan):
                self._worker.receive(action.plan)
            elif isinstance(action, SendHold):
                self._feed(HoldDone(action.hold.slot, OfferAccepted()))

    def _refill(self) -> None:
        """Offers requests until enough of those taken have not ended their prefill. One with a
        TTFT may be declined, since the decodes of those that wait would fill the replica.
        """
        while self._worker.prefilling < self._waiting:
            offer = self._offer()
            began = time.perf_counter()
            actions = self._core.handle(Offered([offer]), now_unix_s=self._now_unix_s)
            took = time.perf_counter() - began
            if offer.slo.ttlt_s is None:
                self._offer_s.append(took)
            for action in actions:
                if isinstance(action, SendHold):
                    self._worker.hold(action.hold.slot, offer.prompt_tokens)
                    self._feed(HoldDone(action.hold.slot, OfferAccepted()))

    def _offer(self) -> Offer:
        self._offers += 1
        slo = self._slos[self._offers % len(self._slos)]
        return Offer(
            key=RequestKey(f"bench.{self._offers}"),
            attempt=1,
            service_class=ServiceClass.STANDARD,
            tier="t",
            slo=slo,
            importance=1.0 if self._offers % 5 else 10.0,
            application=f"a{self._offers % 4}",
            arrived_unix_s=self._now_unix_s,
            prompt_tokens=self._rng.randint(200, 3000),
            max_tokens=4000,
            next_due_unix_s=slo.first_due_unix_s(self._now_unix_s),
        )
