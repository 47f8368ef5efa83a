"""Checks what a worker reports in a resync: a planner must be able to enter all of it."""

from collections.abc import Sequence

from shared.schemas import Announce, ResyncEntry


def misreported(announce: Announce, entries: Sequence[ResyncEntry]) -> str:
    """The reason why no worker of ours would report these entries; empty if one might."""
    if any(entry.slot >= announce.max_slots for entry in entries):
        return "a slot that it does not have"
    if len({entry.slot for entry in entries}) < len(entries):
        return "two requests in one slot"
    if len({entry.offer.key for entry in entries}) < len(entries):
        return "one request in two slots"
    for entry in entries:
        prompt, made = entry.offer.prompt_tokens, entry.generated_tokens
        if prompt + made > announce.context_tokens:
            return "more tokens than its context"
        if entry.computed_tokens > max(prompt + made - 1, prompt):
            return "more computed than is known"
        if entry.draft_tokens > entry.computed_tokens:
            return "more drafted than is computed"
        if made >= entry.offer.max_tokens:
            return "a request whose tokens are all made"
    return ""
