"""vLLM's drafts: their number in a plan, and their cost."""

from collections.abc import Sequence
from statistics import median

from services.worker.engine import Engine
from shared.columns import pack, unpack_list
from shared.core.turn import Load, Work
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot

LEAST = 0.001  # fraction of an iteration: a cost of 0 would mean that there is no draft
DECODES, PROMPT_TOKENS = 8, 16
ITERATIONS = 12  # of each kind; the first three are dropped


def depths_of(selection: Selection, caps: Sequence[int]) -> list[int]:
    """The number of drafts that each entry may have verified. They form a chain, since vLLM
    verifies no trees.

    Of a selection of trees, every entry gets a chain within its depth and cap. All chains are cut
    to one length where the budget is short.
    """
    depths = [
        min(depth, cap - 1) for depth, cap in zip(unpack_list(selection.depth), caps, strict=True)
    ]
    room = selection.budget_tokens - sum(depth > 0 for depth in depths)
    longest = max(depths, default=0)
    while longest and sum(min(depth, longest) for depth in depths) > room:
        longest -= 1
    return [min(depth, longest) for depth in depths]


def measure_draft(engine: Engine, most: int) -> float:
    """The cost of one more draft as a fraction of an iteration with a few decodes. The engine holds
    nothing, before and after.
    """
    prompt = [7 + n % 64 for n in range(PROMPT_TOKENS)]
    slots = [Slot(n) for n in range(min(DECODES, engine.facts.max_slots))]
    for slot in slots:
        engine.load(Load(slot, prompt, 0, Sampling(temperature=0.0), slot))
    engine.execute([Work(slot, PROMPT_TOKENS, True) for slot in slots], None)
    took_s = {}
    # in this order: vLLM keeps drafting for a while after the last request for drafts
    for depth in (0, most):
        column = pack([depth] * len(slots))
        drafts = (
            Selection(method="chain", depth=column, width=column, budget_tokens=1 << 20)
            if depth
            else None
        )
        runs = [
            engine.execute([Work(slot, 1, True) for slot in slots], drafts).exec_s
            for _ in range(ITERATIONS)
        ]
        took_s[depth] = median(runs[3:])
    for slot in slots:
        engine.release(slot)
    return max(LEAST, (took_s[most] - took_s[0]) / max(1, most - 1) / took_s[0])
