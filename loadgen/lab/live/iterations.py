"""The iterations of a fleet's only replica, as its plans and acks tell of them: what each computed,
and the time that its phases took.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shared import subjects
from shared.bus.api import Bus, Call
from shared.columns import Ints, unpack_list
from shared.core.replica.in_flight import shape_of
from shared.perf.shape import BatchShape
from shared.schemas import BatchPlan, PlanAck
from shared.vocabulary import ReplicaId


class Trees(NamedTuple):
    """The columns of `draft_s` in shared/policy/speculation.py, along the requests that drafted."""

    depth: Ints
    width: Ints
    context: Ints
    missing: Ints


class Iteration(NamedTuple):
    """One iteration as it ran. Seconds follow each other: waiting and hand-over, drafting, the
    target's pass.
    """

    shape: BatchShape
    verifications: int  # requests that had drafts verified
    drafted: int
    accepted: int
    first_accepted: int  # verifications whose first draft was accepted
    tokens: int  # made
    rest_s: float
    late_s: float  # of these, without the wait for the plan
    draft_s: float
    pass_s: float
    trees: Trees | None


@dataclass(slots=True)
class _Slot:
    """A request as the engine has it."""

    has: int = 0  # KV positions
    filled: int = 0  # of them in the draft model's KV
    decoding: bool = False


class Followed:
    """Listens to one replica from its first ack on. `chains`: its engine drafts what it verifies,
    chains alone, all as deep as the deepest (vLLM), and not the planned trees.
    """

    def __init__(self, *, chains: bool = False) -> None:
        self._chains = chains
        self.iterations: list[Iteration] = []
        self._plans: dict[tuple[int, int], BatchPlan] = {}
        self._slots: dict[int, _Slot] = {}

    async def listen(self, bus: Bus, replica: ReplicaId) -> None:
        await bus.subscribe(subjects.plan(replica), BatchPlan, self.on_plan)
        await bus.subscribe(subjects.acked(replica), PlanAck, self.on_ack)

    def on_plan(self, plan: BatchPlan, _: Call | None) -> None:
        self._plans[plan.epoch, plan.seq] = plan

    def on_ack(self, ack: PlanAck, _: Call | None) -> None:
        plan = self._plans.pop((ack.epoch, ack.plan_seq), None)
        for slot in unpack_list(ack.preempted):
            self._slots[slot] = _Slot()
        for held in ack.held:
            self._slots[held.slot] = _Slot()
        if ack.slots and plan is not None:
            self.iterations.append(self._iteration(ack, plan))

    def _iteration(self, ack: PlanAck, plan: BatchPlan) -> Iteration:
        slots, computed, emitted = map(unpack_list, (ack.slots, ack.computed, ack.emitted))
        nothing = [0] * len(slots)
        drafted = unpack_list(ack.drafted) if ack.drafted else nothing
        cached = unpack_list(ack.cached) if ack.cached else nothing
        trees = _chains(slots, drafted) if self._chains else _planned_trees(plan)
        has, tokens, decode = list[int](), list[int](), list[bool]()
        columns: list[tuple[int, int, int, int]] = []
        for i, slot in enumerate(slots):
            state = self._slots.setdefault(slot, _Slot())
            if computed[i]:
                has.append(state.has + cached[i])
                tokens.append(1 + drafted[i] if state.decoding else computed[i] - cached[i])
                decode.append(state.decoding)
            depth, width = trees.get(slot, (0, 1))
            if depth and state.decoding:
                context = state.has + 1
                columns.append((depth, width, context, context - min(state.filled, state.has)))
                state.filled = state.has + computed[i]
            state.has += computed[i]
            state.decoding = state.decoding or emitted[i] > 0
        verified = [emitted[i] - 1 for i in range(len(slots)) if drafted[i]]
        return Iteration(
            shape=shape_of(
                np.array(has, dtype=np.int32),
                np.array(tokens, dtype=np.int32),
                np.array(decode, dtype=np.bool_),
            ),
            verifications=len(verified),
            drafted=sum(drafted),
            accepted=sum(verified),
            first_accepted=sum(accepted > 0 for accepted in verified),
            tokens=sum(emitted),
            rest_s=max(ack.idle_s + ack.late_s, 0.0),
            late_s=max(ack.late_s, 0.0),
            draft_s=ack.drafted_s,
            pass_s=ack.exec_s - ack.drafted_s,
            trees=Trees(
                *(np.array(column, dtype=np.int32) for column in zip(*columns, strict=True))
            )
            if columns and ack.drafted_s
            else None,
        )


def _chains(slots: Sequence[int], drafted: Sequence[int]) -> dict[int, tuple[int, int]]:
    """[slot] depth and width."""
    deepest = max(drafted, default=0)
    return {slot: (deepest, 1) for slot, drafts in zip(slots, drafted, strict=True) if drafts}


def _planned_trees(plan: BatchPlan) -> dict[int, tuple[int, int]]:
    """[slot] depth and width."""
    if plan.selection is None:
        return {}
    columns = zip(
        unpack_list(plan.slots),
        unpack_list(plan.selection.depth),
        unpack_list(plan.selection.width),
        strict=True,
    )
    return {slot: (depth, width) for slot, depth, width in columns}
