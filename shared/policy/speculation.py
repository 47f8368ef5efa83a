"""The half of speculation that needs the draft's probabilities: pure functions that a worker calls
between drafting and verifying.

A planner fixes depth, width, needs and budget one plan ahead (seam.Speculation). Which nodes are
verified can be chosen only once the draft has run: `select` chooses them, and is all of a policy
that a worker executes. `draft_s` gives the cost of drafting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shared.columns import Ints, unpack
from shared.errors import PeerError
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Floats
from shared.schemas import Selection


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafted trees of one iteration, as one run of nodes without the roots. A parent comes
    before its children.
    """

    entry: Ints  # index of the node's entry
    parent: Ints  # index of the node's parent; -1: the root, the entry's newest token
    # product of the draft's probabilities from the root ([adaserve] Eq. 7): the tokens that the
    # node adds to the expected acceptance
    path: Floats


Select = Callable[[Selection, Ints, Candidates], Bools]


def select(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """The candidate nodes to verify, as a mask. Columns of `selection` and `caps` run along the
    same entries.

    The mask has at most cap - 1 nodes of an entry, and no node without its parent. Raises PeerError
    for an unknown method.
    """
    chosen = METHODS.get(selection.method)
    if chosen is None:
        raise PeerError(
            f"no selection is called {selection.method!r}; there are: {', '.join(METHODS)}",
            param="method",
        )
    return chosen(selection, caps, candidates)


def along(selection: Selection, entries: Sequence[int]) -> Selection:
    """The selection for these entries of its plan alone."""
    # every column has four bytes an element
    columns = {
        name: np.frombuffer(getattr(selection, name), dtype="<i4")[entries].tobytes()
        for name in ("depth", "width", "needed")
    }
    return replace(selection, **columns)


def chain(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """The first drafts of each entry, as many as its depth and cap allow ([slos-serve] appendix D:
    lengths are fixed per tier).
    """
    most = np.minimum(caps - 1, unpack(selection.depth))
    chosen: Bools = _places(candidates.entry) < most[candidates.entry]
    return chosen


def slo_then_throughput(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """The nodes that the pace of each entry needs, the neediest entry first; then the likeliest
    nodes of all ([adaserve] Algorithm 2).

    A node's path probability never exceeds its parent's. So a choice by descending probability,
    ties in the order in which they come, keeps every tree connected ([adaserve] appendix B). Where
    budget, caps and `needed_limit_tokens` allow every need to be met, no other nodes that meet them
    within budget and caps have more expected accepted tokens (appendix C). Deviations: Eq. 7's path
    probability is added, not the node's own; the budget is not overshot by one; no entry has more
    than its cap.
    """
    needed: NDArray[np.float32] = np.frombuffer(selection.needed, dtype="<f4")
    depth = unpack(selection.depth)
    budget = max(0, selection.budget_tokens - int(np.count_nonzero(depth > 0)))
    likeliest = np.argsort(-candidates.path, kind="stable")
    entry, path = candidates.entry[likeliest], candidates.path[likeliest]
    # an entry takes its own nodes from the likeliest down, so their number identifies them
    place = _places(entry)

    # [entries, 1 for the root, then its nodes from the likeliest down]
    path_of = np.zeros((len(caps), int(place.max(initial=0)) + 2))
    path_of[:, 0] = 1.0
    path_of[entry, place + 1] = path
    enough = np.minimum(needed, depth + 1.0)  # A_cap
    missing = np.cumsum(path_of, axis=1) < enough[:, None]  # with the nodes so far
    most = np.minimum(caps - 1, np.bincount(entry, minlength=len(caps)))
    toward = np.minimum(
        np.count_nonzero(missing, axis=1), np.minimum(most, selection.needed_limit_tokens - 1)
    )
    neediest = np.argsort(-needed, kind="stable")
    before = np.cumsum(toward[neediest]) - toward[neediest]
    toward[neediest] = np.clip(budget - before, 0, toward[neediest])

    wanted: Bools = place < toward[entry]
    others = (~wanted & (place < most[entry])).nonzero()[0]
    wanted[others[: budget - int(toward.sum())]] = True
    chosen: Bools = np.zeros(len(entry), dtype=np.bool_)
    chosen[likeliest[wanted]] = True
    return chosen


def _places(entry: Ints) -> NDArray[np.intp]:
    """[nodes] the number of nodes of the same entry that come before each."""
    by_entry = np.argsort(entry, kind="stable")
    sorted_entry = entry[by_entry]
    first = np.searchsorted(sorted_entry, sorted_entry)
    places = np.empty(len(entry), dtype=np.intp)
    places[by_entry] = np.arange(len(entry)) - first
    return places


METHODS: dict[str, Select] = {"chain": chain, "slo_then_throughput": slo_then_throughput}


def draft_s(draft: Draft, *, depth: Ints, width: Ints, context: Ints, missing: Ints) -> float:
    """The seconds that the draft model takes in one iteration: the positions it lacks, then a step
    for each level, all entries at once.

    Entries with depth 0 must not be among the columns. `context`: the entry's tokens. `missing`:
    those of them that are not in the draft's KV.
    """
    if not len(depth):
        return 0.0
    # An entry that lacks its whole context, the prompt included, is a prefill. Another drafted
    # before, and computes what it still lacks beside its newest token.
    new = missing >= context
    l_in = missing[new].astype(np.int64)
    first = BatchShape(
        int(l_in.sum()),
        len(l_in),
        float((l_in * l_in).sum()),
        decodes=int(np.count_nonzero(~new)),
        decode_context=int((context - missing)[~new].sum()),
    ).with_drafts(missing[~new] - 1, (context - missing)[~new])
    total_s = draft.read_s(first)
    alike = int(depth.min())  # steps that all entries take
    if alike > 1:
        total_s += (alike - 1) * draft.step_s(
            BatchShape(decodes=int(width.sum()), decode_context=int((width * context).sum()))
        )
    for step in range(alike, int(depth.max())):
        going = depth > step
        beams = width[going]
        total_s += draft.step_s(
            BatchShape(decodes=int(beams.sum()), decode_context=int((beams * context[going]).sum()))
        )
    return total_s
