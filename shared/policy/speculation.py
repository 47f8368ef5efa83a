"""The part of speculation that needs the draft's probabilities: pure functions that a worker calls
between drafting and verifying.

A planner fixes depth, width and budget one plan ahead (seam.Speculation). Which nodes are verified
can be chosen only once the draft has run: `select` chooses them, by needs that the worker has
computed (need.py). `select` and need.py are all of a policy that a worker executes. An engine that
verifies only chains (vLLM) asks `depths_of` in place of `select`, before it drafts. `draft_s`
gives the cost of drafting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shared.columns import Indices, Ints, unpack
from shared.errors import PeerError
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy.need import Needs
from shared.policy.seam import Bools, Floats, View
from shared.schemas import Selection


@dataclass(frozen=True, slots=True)
class Candidates:
    """The drafted trees of one iteration, without their roots, which are the newest tokens of the
    entries. `there` and `path` are [levels, entries, beams].
    """

    depth: Ints  # [entries] levels; 0: the entry has no tree
    there: Bools  # false where a tree is shorter or narrower than others
    # product of the draft's probabilities from the root ([adaserve] Eq. 7): the tokens that the
    # node adds to the expected acceptance
    path: Floats


Node = TypeVar("Node", np.bool_, np.float64)
Select = Callable[[Selection, Ints, Needs, Candidates], Bools]


def select(selection: Selection, caps: Ints, needed: Needs, candidates: Candidates) -> Bools:
    """The candidate nodes to verify, as a mask: [levels, entries, beams]. Columns of `selection`
    and `caps` run along the same entries, as does `needed`: the tokens that keep the pace of each.

    The mask has at most cap - 1 nodes of an entry, and no node without the one that it extends.
    Raises PeerError for an unknown method.
    """
    chosen = METHODS.get(selection.method)
    if chosen is None:
        raise PeerError(
            f"no selection is called {selection.method!r}; there are: {', '.join(METHODS)}",
            param="method",
        )
    return chosen(selection, caps, needed, candidates)


def along(selection: Selection, entries: Sequence[int]) -> Selection:
    """The selection for only these entries of its plan."""
    # every column has four bytes an element
    columns = {
        name: np.frombuffer(getattr(selection, name), dtype="<i4")[entries].tobytes()
        for name in ("depth", "width")
    }
    return replace(selection, **columns)


def without_drafts(selection: Selection, entries: Sequence[int]) -> Selection:
    """The selection in which these entries of its plan do not draft."""
    depth = unpack(selection.depth).copy()
    depth[entries] = 0
    return replace(selection, depth=depth.tobytes())


def chain(selection: Selection, caps: Ints, _needed: Needs, candidates: Candidates) -> Bools:
    """The first drafts of each entry, as many as its depth and cap allow ([slos-serve] appendix D:
    lengths are fixed per tier).
    """
    there = _by_entry(candidates.there)
    most = np.minimum(caps - 1, unpack(selection.depth))
    return _by_level(there & (np.cumsum(there, axis=1) <= most[:, None]), candidates.there)


def slo_then_throughput(
    selection: Selection, caps: Ints, needed: Needs, candidates: Candidates
) -> Bools:
    """The nodes that the pace of each entry needs, the neediest entry first; then the likeliest
    nodes of all ([adaserve] Algorithm 2).

    A node's path probability never exceeds that of the one it extends. So a choice by descending
    probability, ties level by level, keeps every tree connected ([adaserve] appendix B). Where
    budget, caps and `needed_limit_tokens` allow every need to be met, no other nodes that meet them
    within budget and caps have more expected accepted tokens (appendix C). Deviations: Eq. 7's path
    probability is added, not the node's own; the budget is not overshot by one; no entry has more
    than its cap.
    """
    depth, left, path = candidates.depth, candidates.there, candidates.path
    budget = max(0, selection.budget_tokens - int(np.count_nonzero(depth)))
    nodes = left.sum(axis=(0, 2))
    capped = (caps - 1 < nodes).nonzero()[0]
    if len(capped):
        left = left.copy()
        left[:, capped] = _likeliest(left[:, capped], path[:, capped], caps[capped] - 1)
        nodes = np.minimum(caps - 1, nodes)
    if np.count_nonzero(left) <= budget:
        return left
    enough = np.minimum(needed, depth + 1.0)  # A_cap
    needy = (enough > 1.0).nonzero()[0]
    chosen: Bools = np.zeros(left.shape, dtype=np.bool_)
    if len(needy):
        needy = needy[np.argsort(-needed[needy], kind="stable")]
        toward = np.minimum(
            _missing(left[:, needy], path[:, needy], enough[needy]),
            np.minimum(nodes[needy], selection.needed_limit_tokens - 1),
        )
        toward = np.clip(budget - (np.cumsum(toward) - toward), 0, toward)
        chosen[:, needy] = _likeliest(left[:, needy], path[:, needy], toward)
        left = left & ~chosen
        budget -= int(toward.sum())
    likeliest = np.where(left, -path, 1.0).ravel().argsort(kind="stable")
    chosen.reshape(-1)[likeliest[:budget]] = True
    return chosen


def _likeliest(there: Bools, path: Floats, count: Ints) -> Bools:
    """The `count` likeliest nodes of each entry."""
    order = np.argsort(_by_entry(np.where(there, -path, 1.0)), axis=1, kind="stable")
    return _by_level(np.argsort(order, axis=1) < count[:, None], there)


def _missing(there: Bools, path: Floats, enough: Floats) -> Indices:
    """[entries] the nodes that each entry takes, from the likeliest down, until their sum with the
    root is `enough`. It may be more than there are.
    """
    minus = np.sort(_by_entry(np.where(there, -path, 0.0)), axis=1)
    with_root = np.ones((len(minus), minus.shape[1] + 1))
    np.negative(minus, out=with_root[:, 1:])
    missing: Indices = (np.cumsum(with_root, axis=1) < enough[:, None]).sum(axis=1)
    return missing


def _by_entry(nodes: NDArray[Node]) -> NDArray[Node]:
    """[entries, nodes] from [levels, entries, beams]."""
    levels, entries, beams = nodes.shape
    return nodes.transpose(1, 0, 2).reshape(entries, levels * beams)


def _by_level(nodes: Bools, like: Bools) -> Bools:
    """The inverse of `_by_entry`, in the shape of `like`."""
    levels, entries, beams = like.shape
    return nodes.reshape(entries, levels, beams).transpose(1, 0, 2)


def depths_of(selection: Selection, caps: Ints, needed: Needs) -> Ints:
    """[entries] the drafts that each entry may have verified, where no trees are verified and no
    probabilities are known. Arguments as for `select`.

    Each entry has as many as its depth and cap allow, if the budget suffices. If not, this is
    `slo_then_throughput` ([adaserve] Algorithm 2) of chains whose drafts are all certain: first the
    drafts that each pace needs, one for each token, the neediest entry first; then the first draft
    of every entry, the second of every entry, and so on, in the order of the plan.
    """
    depth: Ints = np.minimum(unpack(selection.depth), caps - 1)
    there = (np.arange(depth.max(initial=0))[:, None] < depth)[:, :, None]
    certain = Candidates(depth, there, np.ones(there.shape))
    chosen = slo_then_throughput(selection, caps, needed, certain)
    depths: Ints = chosen.sum(axis=(0, 2), dtype=np.int32)
    return depths


METHODS: dict[str, Select] = {"chain": chain, "slo_then_throughput": slo_then_throughput}


def draft_room(depth: Ints, width: Ints) -> Ints:
    """The positions behind a context that one entry may fill in the draft model's KV: its newest
    token, then the nodes of all levels but the last, or the same of them once they are text.
    """
    room: Ints = 1 + np.maximum((depth - 1) * width, depth)
    return room


def draft_s(
    draft: Draft, depth: Ints, width: Ints, context: Ints, missing: Ints, *, together: bool = False
) -> float:
    """The seconds that the draft model takes in one iteration: it reads the positions that its KV
    lacks, then takes a step for each level, for all entries at once.

    Entries with depth 0 must not be among the columns. `context`: the entry's tokens. `missing`:
    those of them that are not in the draft's KV. `together`: the engine drafts for all as deep as
    for the deepest (where it verifies chains: vLLM).
    """
    if not len(depth):
        return 0.0
    if together:
        depth = np.full_like(depth, depth.max())
    # An entry that lacks its whole context, the prompt included, is a prefill. Another drafted
    # before, and computes what it still lacks beside its newest token.
    new = missing >= context
    cached, drafts = context - missing, missing - 1
    prompts = BatchShape()
    if np.count_nonzero(new):
        l_in = missing[new].astype(np.int64)
        prompts = BatchShape(int(l_in.sum()), len(l_in), float((l_in * l_in).sum()))
        cached, drafts = cached[~new], drafts[~new]
    first = prompts.with_decodes(len(cached), sum(cached.tolist())).with_drafts(drafts, cached)
    # no logits are needed for positions that are only read
    total_s = draft.read_s(first._replace(drafts=0) if first.drafts else first)
    levels = depth.tolist()
    alike, deepest = min(levels), max(levels)  # steps that all entries take, and that some take
    if alike > 1:
        total_s += (alike - 1) * draft.step_s(_beams(width, context))
    for step in range(alike, deepest):
        going = depth > step
        total_s += draft.step_s(_beams(width[going], context[going]))
    return total_s


def lacking(view: View, rows: Indices) -> Ints:
    """[rows] the tokens of each, its newest included, that are not in the draft's KV. The draft
    model made the unsure tokens itself.
    """
    computed = view.computed_tokens[rows]
    missing: Ints = computed + 1 - np.minimum(view.draft_tokens[rows], computed)
    return missing


def draft_rows_s(view: View, rows: Indices, depth: Ints, width: Ints) -> float:
    """`draft_s` of these rows of a view, as the policy knows them; some depths may be 0."""
    assert view.draft is not None
    drafts = depth > 0
    rows = rows[drafts]
    return draft_s(
        view.draft,
        depth=depth[drafts],
        width=width[drafts],
        context=view.top_tokens[rows] + 1,
        missing=lacking(view, rows),
        together=view.longest_chain > 0,
    )


def _beams(width: Ints, context: Ints) -> BatchShape:
    """The shape of a step with `width` beams for each entry."""
    beams = width.tolist()
    return BatchShape(decodes=sum(beams), decode_context=sum(map(mul, beams, context.tolist())))
