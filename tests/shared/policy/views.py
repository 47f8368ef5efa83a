"""Makes views of a replica, as policies see it, and a linear profile; Hypothesis draws both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from hypothesis import strategies as st

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import DEFINITIONS, Choice, Phase, View
from shared.vocabulary import Definition

NOW = 1000.0
BLOCK = 16


class Linear:
    """A profile: 10 ms + 80 us per prefill token + 30 us per decode + 0.1 us per cached token of a
    decode + attention of the chunks.
    """

    name = "linear"

    def batch_s(self, shape: BatchShape) -> float:
        attention = (
            1e-8 * (shape.prefill_cross + shape.prefill_sq / 2) + 1e-7 * shape.decode_context
        )
        return 0.010 + 8e-5 * shape.prefill_tokens + 3e-5 * shape.decodes + attention

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (
                (middle, high)
                if self.batch_s(shape.with_chunk(middle, cached)) <= budget_s
                else (low, middle - 1)
            )
        return low


@dataclass(frozen=True, kw_only=True)
class Row:
    """One request; instants are relative to NOW. It holds the KV that its computed tokens need."""

    slot: int = 0
    phase: Phase = Phase.WAITING
    target: int = 100
    computed: int = 0
    generated: int = 0
    max_tokens: int = 500
    application: int = 0
    arrived_s: float = 0.0
    ttft_s: float = math.inf
    tbt_s: float = math.inf
    ttlt_s: float = math.inf
    next_due_s: float | None = None  # None: by Eq. 2
    importance: float = 1.0
    best_effort: bool = False
    unsure: int = 0
    load_s: float = 0.0
    offloaded: bool = False
    thinking: bool = False
    definition: Definition = Definition.DEADLINE
    later_tbt_s: float = math.inf  # of stages still to come

    @property
    def due_s(self) -> float:
        if self.next_due_s is not None:
            return self.next_due_s
        if self.generated == 0:
            return self.arrived_s + self.ttft_s
        return self.arrived_s + self.ttft_s + self.generated * self.tbt_s


def interactive(slot: int, **more: object) -> Row:
    return Row(**{"slot": slot, "ttft_s": 6.0, "tbt_s": 0.05, **more})  # type: ignore[arg-type]


def summary(slot: int, **more: object) -> Row:
    return Row(**{"slot": slot, "ttlt_s": 600.0, **more})  # type: ignore[arg-type]


def decode(row: Row, *, context: int = 200, generated: int = 5) -> Row:
    values = {f.name: getattr(row, f.name) for f in fields(Row)}
    return Row(
        **{
            **values,
            "phase": Phase.DECODE,
            "target": context,
            "computed": context,
            "generated": generated,
        }
    )


def view(
    rows: Sequence[Row],
    *,
    profile: Profile | None = None,
    free: int | None = None,
    capacity: int = 10_000,
) -> View:
    """A view of these rows. `free`: blocks; None for the part of the capacity that they leave."""
    held = [-(-(r.computed + r.unsure) // BLOCK) for r in rows]

    def ints(values: Sequence[int]) -> np.ndarray:
        return frozen(np.array(values, dtype=np.int32))

    def floats(values: Sequence[float]) -> np.ndarray:
        return frozen(np.array(values, dtype=np.float64))

    def frozen(array: np.ndarray) -> np.ndarray:
        array.flags.writeable = False
        return array

    return View(
        start_unix_s=NOW,
        profile=profile or Linear(),
        kv_blocks=capacity,
        kv_free_blocks=capacity - sum(held) if free is None else free,
        block_tokens=BLOCK,
        context_tokens=32_768,
        slot=ints([r.slot for r in rows]),
        phase=ints([r.phase for r in rows]),
        prompt_tokens=ints([r.target for r in rows]),
        target_tokens=ints([r.target for r in rows]),
        computed_tokens=ints([r.computed for r in rows]),
        load_s=floats([r.load_s for r in rows]),
        generated_tokens=ints([r.generated for r in rows]),
        unsure_tokens=ints([r.unsure for r in rows]),
        draft_tokens=ints([0 for _ in rows]),
        max_tokens=ints([r.max_tokens for r in rows]),
        kv_held_blocks=ints(held),
        application=ints([r.application for r in rows]),
        arrived_unix_s=floats([NOW + r.arrived_s for r in rows]),
        first_token_unix_s=floats([NOW + r.arrived_s if r.generated else math.inf for r in rows]),
        newest_token_unix_s=floats([NOW if r.generated else math.inf for r in rows]),
        first_due_unix_s=floats([NOW + r.arrived_s + r.ttft_s for r in rows]),
        next_due_unix_s=floats([NOW + r.due_s for r in rows]),
        last_due_unix_s=floats([NOW + r.arrived_s + r.ttlt_s for r in rows]),
        tbt_s=floats([r.tbt_s for r in rows]),
        tightest_tbt_s=floats([min(r.tbt_s, r.later_tbt_s) for r in rows]),
        thinking=frozen(np.array([r.thinking for r in rows], dtype=np.bool_)),
        definition=ints([DEFINITIONS.index(r.definition) for r in rows]),
        importance=floats([r.importance for r in rows]),
        best_effort=frozen(np.array([r.best_effort for r in rows], dtype=np.bool_)),
        offloaded=frozen(np.array([r.offloaded for r in rows], dtype=np.bool_)),
        applications=["a", "b", "c"],
    )


def entries(choice: Choice) -> dict[int, int]:
    """The caps by slot, in order. Fails if a slot comes twice."""
    slots, caps = choice.slots.tolist(), choice.caps.tolist()
    assert len(set(slots)) == len(slots) == len(caps)
    assert choice.slots.dtype == choice.caps.dtype == np.int32
    return dict(zip(slots, caps, strict=True))


def shape_of(seen: View, choice: Choice) -> BatchShape:
    """The shape of the batch that the choice makes."""
    shape = BatchShape()
    at = {slot: i for i, slot in enumerate(seen.slot.tolist())}
    for slot, cap in entries(choice).items():
        i = at[slot]
        cached = int(seen.computed_tokens[i] + seen.unsure_tokens[i])
        shape = (
            shape._replace(decodes=shape.decodes + 1, decode_context=shape.decode_context + cached)
            if seen.phase[i] == Phase.DECODE
            else shape.with_chunk(cap, cached)
        )
    return shape


@st.composite
def rows(draw: st.DrawFn, most: int = 24) -> list[Row]:
    made = []
    for slot in draw(st.permutations(range(draw(st.integers(0, most))))):
        phase = draw(st.sampled_from(Phase))
        target = draw(st.integers(1, 6000))
        computed = {
            Phase.WAITING: 0,
            Phase.PREFILL: draw(st.integers(0, target - 1)),
            Phase.DECODE: target,
        }[phase]
        kind = draw(st.sampled_from(["interactive", "summary", "none", "both"]))
        generated = draw(st.integers(1, 300)) if phase == Phase.DECODE else 0
        made.append(
            Row(
                slot=slot,
                phase=Phase.PREFILL
                if 0 < computed < target
                else phase
                if phase == Phase.DECODE
                else Phase.WAITING,
                target=target,
                computed=computed,
                generated=generated,
                max_tokens=draw(st.integers(generated + 1, 1000)),
                application=draw(st.integers(0, 2)),
                arrived_s=draw(st.integers(-64 * 20, 0)) / 64,
                ttft_s=draw(st.sampled_from([1.0, 6.0]))
                if kind in ("interactive", "both")
                else math.inf,
                tbt_s=draw(st.sampled_from([0.05, 0.1]))
                if kind in ("interactive", "both")
                else math.inf,
                ttlt_s=draw(st.sampled_from([20.0, 600.0]))
                if kind in ("summary", "both")
                else math.inf,
                importance=draw(st.sampled_from([0.5, 1.0, 2.0])),
                best_effort=draw(st.booleans()),
                unsure=draw(st.integers(0, 3)) if phase == Phase.DECODE else 0,
            )
        )
    return made


views = st.builds(
    lambda rs, free: view(rs, free=free), rows(), st.one_of(st.none(), st.integers(0, 400))
)
