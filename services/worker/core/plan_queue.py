"""The plans that a worker has accepted and not begun, in order. The queue accepts a plan only from
the highest (epoch, sync), which is a lease and a resync within it, and only as the next in
sequence.
"""

from collections import deque

from shared.columns import unpack_list
from shared.policy.speculation import METHODS
from shared.schemas import BatchPlan, PlanRefused
from shared.vocabulary import MOST_DRAFTS

VALUE_BYTES = 4  # of one int32 or float32 in a column


class PlanQueue:
    def __init__(self, incarnation: str, max_slots: int) -> None:
        self._incarnation = incarnation
        self._max_slots = max_slots
        self.epoch = 0
        self.sync = 0
        self.next_seq = 1  # of the plan expected next
        self._begun_seq = 0
        self._plans: deque[BatchPlan] = deque()

    def __len__(self) -> int:
        return len(self._plans)

    def resync(self, epoch: int, sync: int) -> bool:
        """Drop the plans not begun: a planner takes over or resyncs. False: its lease is stale."""
        if (epoch, sync) < (self.epoch, self.sync):
            return False
        self.epoch, self.sync = epoch, sync
        self._plans.clear()
        self.next_seq = self._begun_seq + 1
        return True

    def accept(self, plan: BatchPlan) -> PlanRefused | None:
        """Queue a plan, or refuse it with the reason. A second copy is ignored. A plan of an
        earlier lease is ignored too: its sender learns from the lease that it has lost it.
        """
        if plan.incarnation != self._incarnation:
            return self._refused("another incarnation")
        if (plan.epoch, plan.sync) < (self.epoch, self.sync):
            return None
        if (plan.epoch, plan.sync) > (self.epoch, self.sync):
            return self._refused("resync first")
        if plan.seq < self.next_seq:
            return None
        if plan.seq > self.next_seq:
            return self._refused("a plan is missing")
        if not _well_formed(plan, self._max_slots):
            return self._refused("columns of different lengths, or values out of range")
        self._plans.append(plan)
        self.next_seq += 1
        return None

    def _refused(self, reason: str) -> PlanRefused:
        return PlanRefused(
            incarnation=self._incarnation,
            epoch=self.epoch,
            expected_seq=self.next_seq,
            reason=reason,
        )

    def begin(self) -> BatchPlan | None:
        """Take the next plan off the queue; a resync can no longer drop it. None: no plan waits."""
        if not self._plans:
            return None
        plan = self._plans.popleft()
        self._begun_seq = plan.seq
        return plan


def _well_formed(plan: BatchPlan, max_slots: int) -> bool:
    """Columns have equal lengths, slots exist, caps are positive, no request has two entries, and
    what is drafted is chosen by a known method from trees that are not too large.
    """
    slot_columns = (plan.slots, plan.released, plan.preempted, plan.relegated, plan.promoted)
    columns = [plan.caps, *slot_columns]
    drafts: list[bytes] = []
    if plan.selection is not None:
        drafts = [plan.selection.depth, plan.selection.width]
        if any(len(column) != len(plan.slots) for column in drafts):
            return False
        if plan.selection.method not in METHODS:
            return False
    if any(len(column) % VALUE_BYTES for column in columns + drafts):
        return False
    released = VALUE_BYTES * len(plan.released_why)
    if len(plan.slots) != len(plan.caps) or len(plan.released) != released:
        return False
    if any(not 0 <= slot < max_slots for column in slot_columns for slot in unpack_list(column)):
        return False
    if any(not 0 <= n <= MOST_DRAFTS for column in drafts for n in unpack_list(column)):
        return False
    slots = unpack_list(plan.slots)
    return len(set(slots)) == len(slots) and all(cap > 0 for cap in unpack_list(plan.caps))
