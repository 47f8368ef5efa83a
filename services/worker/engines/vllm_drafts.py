"""The number of drafts that a plan wants of vLLM."""

from collections.abc import Sequence

from shared.columns import unpack_list
from shared.schemas import Selection


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
