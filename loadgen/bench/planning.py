"""Times a replica's core (the object that decides, without I/O) without a bus: a planning step, the
digestion of an ack, the answer to an offer.

The replica is in a steady state: 256 requests decode and 64 wait at every step, and each request
that ends is replaced. `slackline` is measured with a long queue as well.
"""

import gc
import time
from random import Random
from typing import NamedTuple

from loadgen.bench.figure import Figure, spread
from loadgen.bench.stand_in import StandInWorker, announcement, decoding, offer
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
from shared.schemas import Offer, OfferAccepted
from shared.vocabulary import ReplicaId, Slo

PART = "planning step"
AIM_P50_S, AIM_P99_S = 0.0003, 0.001
AIM_LONG_P99_S, AIM_OFFER_S = 0.002, 0.0003
DECODES, WAITING, MANY_WAITING = 256, 64, 2_000
WARM_UP_STEPS = 60
PROFILE = "a100-llama3-8b"
# Interactive, summary and batch requests in turn, so that the queue has both kinds of deadline.
SLOS = (Slo(ttft_s=60.0, tbt_s=0.1), Slo(ttlt_s=600.0), Slo(ttlt_s=86_400.0))


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
        plan_kb = sum(seen.plan_bytes) / len(seen.plan_bytes) / 1e3
        note = f"kB; {sum(seen.entries) / len(seen.entries):.0f} entries"
        load = f"{policy}, {DECODES} decodes and {WAITING} waiting, encoded"
        offered = f"{policy}, answering an offer with a TTFT"
        figures += [
            *spread(PART, load, seen.plan_s, p50=AIM_P50_S, p99=AIM_P99_S),
            *spread(PART, f"{policy}, the same, CPU of the thread", seen.plan_cpu_s),
            *spread(PART, f"{policy}, digesting its ack", seen.ack_s),
            *spread(PART, offered, seen.offer_s, p50=AIM_OFFER_S),
            Figure(PART, f"{policy}, size of a plan", plan_kb, "", note=note),
        ]
    seen = Bench(Random(seed), "slackline", MANY_WAITING).run(max(steps // 10, 1))
    load = f"slackline, {DECODES} decodes and {MANY_WAITING} waiting, encoded"
    return figures + spread(PART, load, seen.plan_s, p99=AIM_LONG_P99_S)


class Bench:
    """The core of one replica and a stand-in for its worker, in virtual time."""

    def __init__(self, rng: Random, policy: str, waiting: int = WAITING) -> None:
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
        seen = Steps([], [], [], self._offer_s, [], [])
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
        self._core.check()
        return seen

    def _synchronise(self) -> None:
        """Gives the core and the worker DECODES requests that decode already."""
        announced = announcement(ReplicaId("r1"), PROFILE, self._now_unix_s)
        entries = [
            decoding(slot, self._offer(), self._rng.randint(1, 400)) for slot in range(DECODES)
        ]
        for slot in range(DECODES):
            self._worker.hold(slot, 0)
        self._feed(Synced(announced, sync=1, next_seq=1, ack_seq=0, entries=entries))

    def _feed(self, event: Synced | HoldDone) -> None:
        self._carry_out(self._core.handle(event, now_unix_s=self._now_unix_s))

    def _carry_out(self, actions: list[ReplicaAction]) -> None:
        for action in actions:
            if isinstance(action, SendPlan):
                self._worker.receive(action.plan)
            elif isinstance(action, SendHold):
                self._feed(HoldDone(action.hold.slot, OfferAccepted()))

    def _refill(self) -> None:
        """Offers requests until enough of those taken are still in prefill. A request with a TTFT
        may be declined, since the decodes of waiting requests would fill the replica.
        """
        while self._worker.prefilling < self._waiting:
            offered = self._offer()
            began = time.perf_counter()
            actions = self._core.handle(Offered([offered]), now_unix_s=self._now_unix_s)
            took = time.perf_counter() - began
            if offered.slo.ttlt_s is None:
                self._offer_s.append(took)
            for action in actions:
                if isinstance(action, SendHold):
                    self._worker.hold(action.hold.slot, offered.prompt_tokens)
                    self._feed(HoldDone(action.hold.slot, OfferAccepted()))

    def _offer(self) -> Offer:
        self._offers += 1
        slo = self._slos[self._offers % len(self._slos)]
        importance = 1.0 if self._offers % 5 else 10.0
        prompt_tokens = self._rng.randint(200, 3000)
        return offer(self._offers, slo, prompt_tokens, self._now_unix_s, importance)
