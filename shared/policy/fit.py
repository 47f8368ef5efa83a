"""Admission for policies without any of their own: accept each request that can be finished."""

from collections.abc import Sequence

from shared.policy.chunk import blocks
from shared.policy.seam import Admission, View
from shared.schemas import Offer


def accept_what_fits(view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
    """Accept each offer whose prompt and longest output fit the context, and the KV of an empty
    replica.

    A request larger than the KV would be preempted for its own sake for ever. The request table
    takes care of slots.
    """
    return [_answer(view, offer.prompt_tokens + offer.max_tokens) for offer in offers]


def _answer(view: View, tokens: int) -> Admission:
    if tokens > view.context_tokens:
        return Admission(
            False,
            reason=f"prompt and output need {tokens} tokens, "
            f"the context holds {view.context_tokens}",
        )
    if blocks(tokens, view.block_tokens) > view.kv_blocks:
        return Admission(
            False,
            reason=f"prompt and output need {tokens} tokens of KV, "
            f"the replica holds {view.kv_blocks * view.block_tokens}",
        )
    return Admission(True)
