"""One replica's core at steady state, without a bus: what a planning step and the digestion of an
ack cost.

256 decodes and 64 waiting at every step: whoever ends is replaced. A stand-in for the worker runs
each plan as it was sent, except that it stops the oldest decode whenever there are more than 256,
which the planner cannot foresee: acks are reconciled.
"""

import gc
import time
from collections import deque
from random import Random
from typing import NamedTuple

from loadgen.bench.figure import Figure, spread
from shared.bus import codec
from shared.columns import pack, unpack_list
from shared.core.replica import ReplicaCore
from shared.core.replica_events import (
    Acked,
    HoldDone,
    Offered,
    ReplicaAction,
    SendHold,
    SendPlan,
    Synced,
)
from shared.core.tick import Tick
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.schemas import Announce, BatchPlan, HoldAccepted, Offer, PlanAck, ResyncEntry
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

PART = "planning step"
AIM_P50_S, AIM_P99_S = 0.0003, 0.001
DECODES, WAITING = 256, 64
WARM_UP_STEPS = 60
PROFILE = "a100-llama3-8b"
KV_BLOCKS, BLOCK_TOKENS, CONTEXT_TOKENS = 80_000, 16, 8192  # so much KV that none is ever preempted
# Interactive, a summary and a batch in turn: both kinds of deadline are in the queue. Loose enough
# that nobody is relegated.
SLOS = (Slo(ttft_s=60.0, tbt_s=0.1), Slo(ttlt_s=600.0), Slo(ttlt_s=86_400.0))
REPLICA, INCARNATION = ReplicaId("r1"), "i1"


class Steps(NamedTuple):
    """Seconds of each step: by the wall, and of this thread's CPU alone, which others' work does
    not lengthen.
    """

    plan_s: list[float]
    plan_cpu_s: list[float]
    ack_s: list[float]
    plan_bytes: list[int]
    entries: list[int]


def measure(steps: int, seed: int) -> list[Figure]:
    seen = Plant(Random(seed)).run(steps)
    bytes_mean = sum(seen.plan_bytes) / len(seen.plan_bytes)
    entries = sum(seen.entries) / len(seen.entries)
    return [
        *spread(
            PART,
            f"qoserve, {DECODES} decodes and {WAITING} waiting, encoded",
            seen.plan_s,
            "ms",
            p50=AIM_P50_S,
            p99=AIM_P99_S,
        ),
        *spread(PART, "the same, CPU of the thread", seen.plan_cpu_s, "ms"),
        *spread(PART, "digesting its ack", seen.ack_s, "ms"),
        Figure(
            part=PART,
            name="size of a plan",
            value=bytes_mean / 1e3,
            unit="",
            note=f"kB; {entries:.0f} entries",
        ),
    ]


class Plant:
    """The core and its stand-in worker, in virtual time."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._profile = profiles.load(PROFILE)
        self._core = ReplicaCore(registry.make("qoserve"), self._profile, epoch=1)
        # now, and the end of the last iteration that ran
        self._now_unix_s = self._ended_unix_s = 1_000_000.0
        self._count = 0
        # slot -> tokens still to compute before it decodes; 0: it decodes
        self._left: dict[int, int] = {}
        self._plans: deque[BatchPlan] = deque()
        self._ack_seq = 0
        self._begin()

    def _begin(self) -> None:
        announce = Announce(
            replica=REPLICA, incarnation=INCARNATION, at_unix_s=self._now_unix_s, model="m", engine="sim", profile=PROFILE, pool="",
            kv_blocks=KV_BLOCKS, block_tokens=BLOCK_TOKENS, context_tokens=CONTEXT_TOKENS, max_slots=1024, epoch=0,
        )  # fmt: skip
        entries = []
        for slot in range(DECODES):
            offer = self._offer()
            made = self._rng.randint(1, 400)
            entries.append(
                ResyncEntry(
                    slot=slot,
                    offer=offer,
                    computed_tokens=offer.prompt_tokens + made - 1,
                    generated_tokens=made,
                )
            )
            self._left[slot] = 0
        self._feed(Synced(announce, sync=1, next_seq=1, ack_seq=0, entries=entries))
        self._refill()

    def run(self, steps: int) -> Steps:
        seen = Steps([], [], [], [], [])
        gc.collect()
        for step in range(-WARM_UP_STEPS, steps):
            wake = self._core.wake_at_unix_s()
            assert wake is not None, "there is always work"
            self._now_unix_s = max(self._now_unix_s, wake)
            began_cpu = time.thread_time()  # it takes 20 us itself: kept out of the other
            began = time.perf_counter()
            actions = self._core.handle(Tick(), now_unix_s=self._now_unix_s)
            encoded = [
                codec.encode(action.plan, json=False)
                for action in actions
                if isinstance(action, SendPlan)
            ]
            took, took_cpu = time.perf_counter() - began, time.thread_time() - began_cpu
            self._carry_out(actions)
            ack = self._run_one()
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

    def _feed(self, event: Synced | Offered | HoldDone) -> None:
        self._carry_out(self._core.handle(event, now_unix_s=self._now_unix_s))

    def _carry_out(self, actions: list[ReplicaAction]) -> None:
        for action in actions:
            if isinstance(action, SendPlan):
                self._plans.append(action.plan)
            elif isinstance(action, SendHold):
                self._feed(HoldDone(action.hold.slot, HoldAccepted()))

    def _refill(self) -> None:
        """So many offers that WAITING have not ended their prefill."""
        missing = WAITING - sum(left > 0 for left in self._left.values())
        for _ in range(missing):
            offer = self._offer()
            for action in self._core.handle(Offered([offer]), now_unix_s=self._now_unix_s):
                assert isinstance(action, SendHold), "there is room"
                self._left[action.hold.slot] = offer.prompt_tokens
                self._feed(HoldDone(action.hold.slot, HoldAccepted()))

    def _offer(self) -> Offer:
        self._count += 1
        slo = SLOS[self._count % len(SLOS)]
        return Offer(
            key=RequestKey(f"bench.{self._count}"), attempt=1, service_class=ServiceClass.STANDARD, tier="t", slo=slo,
            importance=1.0 if self._count % 5 else 10.0, application=f"a{self._count % 4}", arrived_unix_s=self._now_unix_s,
            prompt_tokens=self._rng.randint(200, 3000), max_tokens=4000, next_due_unix_s=slo.first_due_unix_s(self._now_unix_s),
        )  # fmt: skip

    def _run_one(self) -> PlanAck:
        """The ack of the oldest plan, at the instant at which it ends."""
        plan = self._plans.popleft()
        slots, caps = unpack_list(plan.slots), unpack_list(plan.caps)
        released = list(zip(unpack_list(plan.released), plan.released_why, strict=True))
        for slot, _ in released:
            self._left.pop(slot, None)
        ran, computed, emitted, skipped = [], [], [], []
        for slot, cap in zip(slots, caps, strict=True):
            left = self._left.get(slot)
            if left is None:  # stopped before this plan was sent
                skipped.append(slot)
                continue
            done = min(cap, left) if left else 1
            self._left[slot] = max(left - done, 0)
            ran.append(slot)
            computed.append(done)
            emitted.append(int(self._left[slot] == 0))
        decoding = [slot for slot, left in self._left.items() if left == 0]
        ended = [(slot, "stop") for slot in decoding[: max(len(decoding) - DECODES, 0)]]
        for slot, _ in ended:
            del self._left[slot]
        began_unix_s = self._ended_unix_s
        self._now_unix_s = self._ended_unix_s = began_unix_s + plan.predicted_s
        self._ack_seq += 1
        return PlanAck(
            replica=REPLICA, incarnation=INCARNATION, epoch=1, plan_seq=plan.seq, ack_seq=self._ack_seq, slots=pack(ran),
            computed=pack(computed), emitted=pack(emitted), tokens=pack([65] * sum(emitted)), ended=released + ended,
            skipped=pack(skipped), started_unix_s=began_unix_s, ended_unix_s=self._ended_unix_s, exec_s=plan.predicted_s,
        )  # fmt: skip
