"""Speculation, the half that needs the draft's probabilities: pure functions that a worker calls between drafting and verifying.

A planner fixes depth, width, needs and budget one plan ahead (seam.Speculation); what is verified is known only once the draft
has run. `select` is that second half, and all of a policy that a worker executes. `draft_s` is what drafting costs.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.columns import Ints, unpack
from shared.errors import PeerError
from shared.perf.profile import Profile
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Floats
from shared.schemas import Selection


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafted trees of one iteration, all in one run of nodes without their roots; a parent comes before its children."""

    entry: Ints  # index of the node's entry
    parent: Ints  # index of the node's parent; -1: the root, the entry's newest token
    path: Floats  # product of the draft's probabilities from the root ([adaserve] Eq. 7): what the node adds to acceptance


Select = Callable[[Selection, Ints, Candidates], Bools]


def select(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """Which candidate nodes are verified: a mask along them. Columns of `selection` and `caps` run along the same entries.

    At most cap - 1 nodes of an entry, never a node without its parent. Raises PeerError for an unknown method.
    """
    chosen = METHODS.get(selection.method)
    if chosen is None:
        raise PeerError(f"no selection is called {selection.method!r}; there are: {', '.join(METHODS)}", param="method")
    return chosen(selection, caps, candidates)


def chain(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """The first drafts of each entry, as many as its depth and cap say ([slos-serve] appendix D: lengths are fixed per tier)."""
    chosen: Bools = np.zeros(len(candidates.entry), dtype=np.bool_)
    room = np.minimum(caps - 1, unpack(selection.depth))
    for node, entry in enumerate(candidates.entry.tolist()):
        chosen[node] = room[entry] > 0
        room[entry] -= 1
    return chosen


def slo_then_throughput(selection: Selection, caps: Ints, candidates: Candidates) -> Bools:
    """First what each entry's pace needs, the neediest first; then the likeliest nodes of all ([adaserve] Algorithm 2).

    A node's path probability never exceeds its parent's, so taking nodes by descending probability, ties as they come, keeps
    every tree connected ([adaserve] appendix B). Deviations: Eq. 7's path probability is added, not the node's own; the
    budget is not overshot by one.
    """
    needed: NDArray[np.float32] = np.frombuffer(selection.needed, dtype="<f4")
    depth = unpack(selection.depth)
    speculates = depth > 0
    enough = np.minimum(needed, depth + 1.0)  # A_cap
    accepted = np.ones(len(caps))
    room = caps.astype(np.int64) - 1
    budget = selection.budget_tokens - int(np.count_nonzero(speculates))
    chosen: Bools = np.zeros(len(candidates.entry), dtype=np.bool_)
    likeliest = np.argsort(-candidates.path, kind="stable")
    of_entry = candidates.entry[likeliest]
    for entry in np.argsort(-needed, kind="stable").tolist():
        limit = min(int(room[entry]), selection.needed_limit_tokens - 1)
        for node in likeliest[of_entry == entry].tolist():
            if accepted[entry] >= enough[entry] or limit <= 0 or budget <= 0:
                break
            chosen[node] = True
            accepted[entry] += candidates.path[node]
            limit, budget = limit - 1, budget - 1
            room[entry] -= 1
    for node in likeliest.tolist():
        if budget <= 0:
            break
        entry = int(candidates.entry[node])
        if not chosen[node] and room[entry] > 0:
            chosen[node] = True
            room[entry] -= 1
            budget -= 1
    return chosen


METHODS: dict[str, Select] = {"chain": chain, "slo_then_throughput": slo_then_throughput}


def draft_s(draft: Profile, *, depth: Ints, width: Ints, context: Ints, missing: Ints) -> float:
    """Seconds the draft model takes for one iteration: the positions it lacks, then a step for each level, all entries at once.

    Entries with depth 0 must not be among the columns. `context`: the entry's tokens; `missing`: of those, not in the draft's KV.
    """
    if not len(depth):
        return 0.0
    lacking = missing > 1  # one is the newest token, which the first step computes
    l_in, l_has = missing[lacking].astype(np.int64), (context - missing)[lacking].astype(np.int64)
    first = BatchShape(
        int(l_in.sum()),
        len(l_in),
        float((l_in * l_in).sum()),
        float((l_in * l_has).sum()),
        int(l_has.sum()),
        int(np.count_nonzero(~lacking)),
        int(context[~lacking].sum()),
    )
    total_s = draft.batch_s(first)
    for step in range(1, int(depth.max())):
        going = depth > step
        beams = width[going]
        total_s += draft.batch_s(BatchShape(decodes=int(beams.sum()), decode_context=int((beams * context[going]).sum())))
    return total_s
