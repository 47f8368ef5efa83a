"""Keeps the time accounts of a virtual replica's requests, as the live worker keeps its own: where
the seconds of each went. Only runs that are to be explained pay for it.
"""

from collections import deque
from collections.abc import Iterable

from msgspec.structs import replace

from shared.columns import unpack_list
from shared.core.record.record import FINAL
from shared.core.record.time_accounting import TimeAccounting
from shared.measure import Measure
from shared.schemas import AttemptOver, BatchPlan, Held, Hold, PlanAck, Record
from shared.store.acklog import account
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo


class Accounts:
    """The accounts of one replica, by slot."""

    def __init__(self, replica: ReplicaId) -> None:
        self._accounting = TimeAccounting(replica)
        self._plans: deque[BatchPlan] = deque()  # not yet done
        self._slots: dict[RequestKey, int] = {}
        self._measures: dict[int, tuple[Slo, Measure]] = {}

    def held(self, hold: Hold, record: Record, now_unix_s: float) -> None:
        held = Held(
            slot=hold.slot,
            key=record.key,
            attempt=record.attempt,
            tier=record.tier,
            at_unix_s=now_unix_s,
            best_effort=record.service_class is ServiceClass.BEST_EFFORT,
        )
        before, measure = record.resume.diary, record.resume.measure
        self._accounting.held(held, before.waited(record.arrived_unix_s, now_unix_s))
        if not measure.tokens:
            measure = Measure.begin(record.slo, record.arrived_unix_s)
        self._slots[record.key], self._measures[hold.slot] = hold.slot, (record.slo, measure)

    def planned(self, plan: BatchPlan) -> None:
        self._plans.append(plan)

    def done(self, ack: PlanAck) -> None:
        """The oldest plan has been done, with this ack."""
        plan = self._plans.popleft()
        scale = ack.exec_s / plan.predicted_s if plan.predicted_s > 0.0 else 0.0
        thought = dict(zip(*map(unpack_list, (ack.answering, ack.thinking_tokens)), strict=True))
        firsts, late = [], []
        for slot, n in zip(unpack_list(ack.slots), unpack_list(ack.emitted), strict=True):
            slo, before = self._measures[slot]
            thinking_tokens = thought.get(slot)
            after = before.emit(n, ack.ended_unix_s, slo, thinking_tokens)
            self._measures[slot] = slo, after
            if n and not before.tokens:
                firsts.append(slot)
            if after.late_tokens and not before.late_tokens:
                found = before.first_late(n, ack.ended_unix_s, slo, thinking_tokens)
                late.append((slot, *found))
        shares = {"decodes_s": plan.decodes_s * scale, "drafts_s": plan.drafts_s * scale}
        account(replace(ack, **shares), firsts, self._accounting)
        for each in late:
            self._accounting.late(*each)

    def over(self, overs: Iterable[AttemptOver]) -> list[AttemptOver]:
        """These attempts have left the replica. Returns them with their timelines."""
        found = []
        for over in overs:
            slot = self._slots.pop(over.key)
            del self._measures[slot]
            timeline = self._accounting.leave(slot)
            if over.why not in FINAL:
                timeline = timeline.left(over.replica, over.why, timeline.account.until_unix_s)
            found.append(replace(over, resume=replace(over.resume, diary=timeline)))
        return found
