"""A stand-in for a worker: it runs each plan as it was sent, in the time that the plan predicts."""

from collections import deque

from shared.columns import pack, unpack_list
from shared.schemas import BatchPlan, PlanAck


class StandInWorker:
    """The requests of one replica, and the plans that it has not run yet.

    Whenever more than `most_decodes` requests decode, the worker stops the oldest of them. The
    planner cannot foresee these stops, so it must reconcile the acks.
    """

    def __init__(self, began_unix_s: float, most_decodes: int) -> None:
        self.ended_unix_s = began_unix_s  # the end of the last iteration
        self.ack_seq = 0  # of the newest ack
        self._most_decodes = most_decodes
        # [slot] prompt tokens still to compute; 0: the request decodes
        self._left: dict[int, int] = {}
        self._plans: deque[BatchPlan] = deque()

    @property
    def has_plan(self) -> bool:
        return bool(self._plans)

    @property
    def prefilling(self) -> int:
        """The number of requests whose prefill has not ended."""
        return sum(left > 0 for left in self._left.values())

    def hold(self, slot: int, left_tokens: int) -> None:
        """Takes a request in; 0 tokens left: it decodes already."""
        self._left[slot] = left_tokens

    def receive(self, plan: BatchPlan) -> None:
        self._plans.append(plan)

    def run_next(self, not_before_unix_s: float = 0.0) -> PlanAck:
        """Runs the oldest plan and returns its ack. An iteration begins at the end of the one
        before, or later where its plan came only at `not_before_unix_s`.
        """
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
        stopped = self._stop_oldest()
        idle_s = max(0.0, not_before_unix_s - self.ended_unix_s)
        began_unix_s = self.ended_unix_s + idle_s
        self.ended_unix_s = began_unix_s + plan.predicted_s
        self.ack_seq += 1
        return PlanAck(
            replica=plan.replica,
            incarnation=plan.incarnation,
            epoch=plan.epoch,
            plan_seq=plan.seq,
            ack_seq=self.ack_seq,
            slots=pack(ran),
            computed=pack(computed),
            emitted=pack(emitted),
            tokens=pack([65] * sum(emitted)),
            ended=released + [(slot, "stop") for slot in stopped],
            skipped=pack(skipped),
            started_unix_s=began_unix_s,
            ended_unix_s=self.ended_unix_s,
            exec_s=plan.predicted_s,
            idle_s=idle_s,
        )

    def _stop_oldest(self) -> list[int]:
        decoding = [slot for slot, left in self._left.items() if left == 0]
        stopped = decoding[: max(len(decoding) - self._most_decodes, 0)]
        for slot in stopped:
            del self._left[slot]
        return stopped
