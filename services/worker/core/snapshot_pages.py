"""Splits a worker's snapshot into pages that a message can carry, by the sizes of attempts."""

from collections.abc import Sequence
from typing import TypeVar

from shared.request_timeline import RequestTimeline
from shared.schemas import AttemptOver, Snapshot, SnapshotEntry, TokenLogprob

Item = TypeVar("Item")
# two accounts, each of ten causes and five neighbours; a step with its reason
TIMELINE_TOKENS, HAPPENING_TOKENS = 300, 80
SNAPSHOT_PAGE_TOKENS = 200_000  # a page stays well under max_payload


def pages(
    incarnation: str, entries: Sequence[SnapshotEntry], overs: Sequence[AttemptOver]
) -> list[Snapshot]:
    """All entries and ends, in order, in one page at least. A page holds SNAPSHOT_PAGE_TOKENS at
    most, or a single attempt.
    """
    held = _paged([(e, _size(e.tokens, e.logprobs, e.diary)) for e in entries])
    resumes = [(over, over.resume) for over in overs]
    ended = _paged([(over, _size(r.tokens, r.logprobs, r.diary)) for over, r in resumes])
    snapshots = [Snapshot(incarnation=incarnation, entries=page, overs=[]) for page in held]
    snapshots += [Snapshot(incarnation=incarnation, entries=[], overs=page) for page in ended]
    return snapshots or [Snapshot(incarnation=incarnation, entries=[], overs=[])]


def _size(tokens: bytes, logprobs: Sequence[TokenLogprob], timeline: RequestTimeline) -> int:
    """The size in tokens of four bytes."""
    noted = TIMELINE_TOKENS + HAPPENING_TOKENS * len(timeline.happenings)
    return noted + len(tokens) // 4 + sum(8 * (1 + len(known.top)) for known in logprobs)


def _paged(items: Sequence[tuple[Item, int]]) -> list[list[Item]]:
    pages: list[list[Item]] = []
    size = 0
    for item, its_size in items:
        size += its_size
        if not pages or size > SNAPSHOT_PAGE_TOKENS:
            pages.append([])
            size = its_size
        pages[-1].append(item)
    return pages
