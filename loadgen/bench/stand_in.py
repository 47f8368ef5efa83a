"""A stand-in for a worker in virtual time, and the messages that fill a replica with requests."""

from collections import deque

from shared.columns import pack, unpack_list
from shared.schemas import Announce, BatchPlan, Offer, PlanAck, ResyncEntry
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

# With so much KV no request is preempted.
KV_BLOCKS, BLOCK_TOKENS, CONTEXT_TOKENS, SLOTS = 80_000, 16, 8192, 4096
LONGEST_OUTPUT = 4000


def announcement(replica: ReplicaId, profile: str, now_unix_s: float) -> Announce:
    return Announce(
        replica=replica,
        incarnation="i1",
        at_unix_s=now_unix_s,
        model="m",
        engine="sim",
        profile=profile,
        pool="",
        kv_blocks=KV_BLOCKS,
        block_tokens=BLOCK_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        max_slots=SLOTS,
        epoch=0,
    )


def offer(
    number: int, slo: Slo, prompt_tokens: int, now_unix_s: float, importance: float = 1.0
) -> Offer:
    return Offer(
        key=RequestKey(f"bench.{number}"),
        attempt=1,
        service_class=ServiceClass.STANDARD,
        tier="t",
        slo=slo,
        importance=importance,
        application=f"a{number % 4}",
        arrived_unix_s=now_unix_s,
        prompt_tokens=prompt_tokens,
        max_tokens=LONGEST_OUTPUT,
        next_due_unix_s=slo.first_due_unix_s(now_unix_s),
    )


def decoding(slot: int, offered: Offer, generated: int) -> ResyncEntry:
    """A request that decodes, with `generated` tokens so far."""
    return ResyncEntry(
        slot=slot,
        offer=offered,
        computed_tokens=offered.prompt_tokens + generated - 1,
        generated_tokens=generated,
    )


class StandInWorker:
    """The requests of one replica, and the plans not run yet. The worker runs each plan as it was
    sent, in the time that the plan predicts.

    Whenever more than `most_decodes` requests decode, the worker stops the oldest of them. The
    planner cannot foresee these stops, so it must reconcile the acks.
    """

    def __init__(self, began_unix_s: float, most_decodes: int, ack_seq: int = 0) -> None:
        self._ended_unix_s = began_unix_s  # the end of the last iteration
        self._ack_seq = ack_seq  # of the newest ack
        self._most_decodes = most_decodes
        # [slot] prompt tokens still to compute; 0: the request decodes
        self._left: dict[int, int] = {}
        self._plans: deque[BatchPlan] = deque()

    @property
    def prefilling(self) -> int:
        """The number of requests whose prefill has not ended."""
        return sum(left > 0 for left in self._left.values())

    def hold(self, slot: int, left_tokens: int) -> None:
        """Takes a request in; 0 tokens left: the request decodes already."""
        self._left[slot] = left_tokens

    @property
    def has_plan(self) -> bool:
        return bool(self._plans)

    def receive(self, plan: BatchPlan) -> None:
        self._plans.append(plan)

    def run_next(self, earliest_unix_s: float = 0.0) -> PlanAck:
        """Runs the oldest plan, from the end of the iteration before, or `earliest_unix_s` if that
        is later, and returns its ack.
        """
        plan = self._plans.popleft()
        released = list(zip(unpack_list(plan.released), plan.released_why, strict=True))
        for slot, _ in released:
            self._left.pop(slot, None)
        ran, computed, emitted, skipped = [], [], [], []
        for slot, cap in zip(unpack_list(plan.slots), unpack_list(plan.caps), strict=True):
            left = self._left.get(slot)
            if left is None:  # stopped before this plan was sent
                skipped.append(slot)
                continue
            done = min(cap, left) if left else 1
            self._left[slot] = max(left - done, 0)
            ran.append(slot)
            computed.append(done)
            emitted.append(int(self._left[slot] == 0))
        stopped = self._stop_oldest()
        began_unix_s = max(self._ended_unix_s, earliest_unix_s)
        self._ended_unix_s = began_unix_s + plan.predicted_s
        self._ack_seq += 1
        return PlanAck(
            replica=plan.replica,
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            plan_seq=plan.seq,
            ack_seq=self._ack_seq,
            slots=pack(ran),
            computed=pack(computed),
            emitted=pack(emitted),
            tokens=pack([65] * sum(emitted)),
            ended=released + [(slot, "stop") for slot in stopped],
            skipped=pack(skipped),
            started_unix_s=began_unix_s,
            ended_unix_s=self._ended_unix_s,
            exec_s=plan.predicted_s,
            idle_s=0.0,
        )

    def _stop_oldest(self) -> list[int]:
        decoding = [slot for slot, left in self._left.items() if left == 0]
        stopped = decoding[: max(len(decoding) - self._most_decodes, 0)]
        for slot in stopped:
            del self._left[slot]
        return stopped
