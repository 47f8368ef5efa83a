"""A seeded model of which drafts a target model would accept. Simulations and sim engines use it,
as they have neither a draft model nor a target.

At output position n of a request the draft gives its k-th likeliest token the probability q
(1-q)^k. The rank k of the token that the target wants there is drawn by the same law. So AdaServe's
assumption holds: a node is accepted with its path probability ([adaserve] Eq. 7). The top
probability q is drawn, too, from Beta(a, 1) with mean `probability` = a/(a+1), so that some
positions are easy and some are hard. Chains are accepted as in [slos-serve] appendix D: each token
with that mean, independently of the others. All draws depend only on (seed of the request, n):
schedules, batches and replicas change nothing. Both laws are choices of ours. `probability` is a
mean over a data set, as published acceptance figures are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shared.columns import Indices, Ints, unpack
from shared.errors import ConfigError
from shared.perf.draft import Draft
from shared.policy.need import Needs
from shared.policy.seam import Bools, Floats
from shared.policy.speculation import Candidates, depths_of, draft_s, select
from shared.schemas import Selection

Seeds = NDArray[np.uint64]

# 2^64 / golden ratio, the increment of SplitMix64 (Steele, Lea, Flood 2014)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# a stream of numbers for each of the two draws: "top", "rank"
_STREAMS = np.array([0x746F70, 0x72616E6B], dtype=np.uint64)[:, None, None]
_FARTHEST = float(1 << 30)  # a rank beyond the width of any tree


class Drafted(NamedTuple):
    """The trees of several requests. `true`: the nodes on the path of the target's own output; axes
    as in `candidates`.
    """

    candidates: Candidates
    true: Bools


# makes the trees of the requests of one iteration, by their output tokens, depths and widths
Trees = Callable[[Ints, Ints, Ints], Drafted]


class Speculated(NamedTuple):
    """The speculation of one iteration of an engine. Columns run along its entries."""

    fills: Ints  # KV positions filled during the iteration, those of rejected drafts included
    kept: Ints  # of these, the positions that stay filled
    drafted: Ints  # draft tokens verified
    filled: Ints  # positions in the draft's KV afterwards
    drafted_s: float  # seconds of the draft model, before the target's pass


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The model. `probability`: the mean probability that the first draft of a position is
    accepted. Raises ConfigError unless in (0, 1].
    """

    probability: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise ConfigError(f"acceptance {self.probability:g}: it must be above 0 and at most 1")

    def draft(self, seeds: Seeds, made: Ints, depth: Ints, width: Ints) -> Drafted:
        """Beam search ([adaserve] Algorithm 2, step 1): at each level the `width` likeliest
        extensions of the level before.

        Columns run along the entries. `made`: the output tokens that the request has. An entry with
        depth 0 drafts nothing.
        """
        levels = np.arange(int(depth.max(initial=0)))[:, None]
        return trees(*self.drawn(seeds, levels + made), depth, width)

    def drawn(self, seeds: Seeds, positions: Indices) -> tuple[Floats, Floats]:
        """The draft's top probability at each position, and the rank that it gives to the target's
        token.
        """
        drawn = _uniform(seeds ^ _STREAMS, positions.astype(np.uint64))
        top: Floats = drawn[0] ** ((1.0 - self.probability) / self.probability)
        with np.errstate(divide="ignore"):  # top 1: rank 0
            rank = np.log(drawn[1]) / np.log1p(-top)
        return top, np.floor(np.minimum(rank, _FARTHEST))


def speculate(
    draft: Draft,
    drafted_trees: Trees,
    selection: Selection,
    tokens: Ints,
    *,
    needed: Needs,
    depth: Ints,
    made: Ints,
    has: Ints,
    filled: Ints,
    longest_chain: int = 0,
) -> Speculated:
    """Draft, select, verify. Selected nodes are connected, so the accepted nodes are those on the
    true path. `longest_chain`: the engine verifies chains of so many drafts at most, and chooses
    their lengths before it drafts, all as deep as the deepest (vLLM); 0: it verifies trees.

    Columns and `selection` run along the entries. `tokens`: the positions that each may compute.
    `needed`: by its pace. `depth`: as `drafting_depth` has it. `made`: its output tokens. `has`:
    its KV positions. `filled`: its positions in the draft's KV, which has no other limit.
    """
    width, speculates = unpack(selection.width), depth > 0
    if longest_chain:
        most: Ints = np.where(speculates, np.minimum(tokens, 1 + longest_chain), 1)
        depth, width = depths_of(selection, most, needed), np.ones_like(width)
    candidates, true = drafted_trees(made, depth, width)
    chosen = candidates.there if longest_chain else select(selection, tokens, needed, candidates)
    drafted: Ints = chosen.sum(axis=(0, 2), dtype=np.int32)
    accepted: Ints = (chosen & true).sum(axis=(0, 2), dtype=np.int32)
    context, drafting = has + 1, depth.nonzero()[0]
    missing = context - np.minimum(filled, has)
    if len(drafting) == len(depth):
        kept = accepted + np.int32(1)
        columns = depth, width, context, missing
        fills, now_filled = drafted + np.int32(1), has + kept
    else:
        columns = depth[drafting], width[drafting], context[drafting], missing[drafting]
        kept = np.where(speculates, accepted + 1, tokens)
        fills = np.where(speculates, drafted + 1, tokens)
        now_filled = np.where(depth > 0, has + kept, filled)
    drafted_s = draft_s(draft, *columns, together=longest_chain > 0)
    return Speculated(fills, kept, drafted, now_filled, drafted_s)


def drafting_depth(selection: Selection, left: Ints, made: Ints) -> Ints:
    """The levels of each entry's tree. `left`: the positions to compute before its next token.
    `made`: its output tokens. An entry with more than one left, or no token made yet, is
    prefilling, and drafts nothing.
    """
    depth: Ints = unpack(selection.depth) * ((left == 1) & (made > 0))
    return depth


# ---------------------------------------------------------------- trees


def trees(top: Floats, wanted: Floats, depth: Ints, width: Ints) -> Drafted:
    """The trees by these draws: [levels, entries] each, as deep as the deepest tree."""
    levels = np.arange(len(top))[:, None]
    there = levels < depth
    widest = max(
        (w for w, deep in zip(width.tolist(), depth.tolist(), strict=True) if deep), default=1
    )
    if widest <= 1:
        path, true = _chains(top, wanted)
        true &= there
        return Drafted(Candidates(depth, there[:, :, None], path[:, :, None]), true[:, :, None])
    width = np.maximum(width, 1)
    nodes = there[:, :, None] & (np.arange(widest) < width[:, None])
    path, true = _beams(top, wanted, width, widest)
    return Drafted(Candidates(depth, nodes, path), true & nodes)


def _chains(top: Floats, wanted: Floats) -> tuple[Floats, Bools]:
    """Trees without branches. All are [levels, entries]."""
    true: Bools = np.logical_and.accumulate(wanted == 0.0, axis=0)
    path: Floats = np.multiply.accumulate(top, axis=0)
    return path, true


def _beams(top: Floats, wanted: Floats, width: Ints, widest: int) -> tuple[Floats, Bools]:
    """Trees by beam search: of each node its path probability, and whether it is true. `top`,
    `wanted`: [levels, entries]. What is found beyond the width of an entry is no node.
    """
    levels, entries = top.shape
    above, rank = _extensions(widest)
    # [2, levels, entries, extensions] factors of a path probability, and of 1 for true and 0 for
    # false. NaN, which is sorted last, for the extensions that a narrower tree does not have.
    factors = np.empty((2, levels, entries, len(above)))
    factors[0] = top[:, :, None] * (1.0 - top[:, :, None]) ** rank
    factors[1] = wanted[:, :, None] == rank
    factors[0, :, np.maximum(above, rank) >= width[:, None]] = np.nan
    # [levels, 2, entries, beams] with the sign of path probabilities turned, for they are sorted
    # from the likeliest down
    nodes = np.empty((levels, 2, entries, widest))
    # only the root is extended first, and its extensions come first, from the likeliest down
    nodes[0] = factors[:, 0, :, :widest]
    np.negative(nodes[0, 0], out=nodes[0, 0])
    start = np.arange(2 * entries).reshape(2, entries, 1) * len(above)
    for level in range(1, levels):
        ahead = nodes[level - 1][:, :, above] * factors[:, level]
        likeliest = ahead[0].argsort(axis=1, kind="stable")[:, :widest]
        ahead.take(start + likeliest, out=nodes[level])
    return -nodes[:, 0], nodes[:, 1] > 0.0


@lru_cache(maxsize=64)
def _extensions(widest: int) -> tuple[Indices, Floats]:
    """The extensions of a level that can be among its `widest` likeliest: the beams, from the
    likeliest down, and the ranks of their next tokens. Beam a with rank k is behind the (a+1)(k+1)
    extensions with neither number larger, ties included.
    """
    pairs = [(a, k) for a in range(widest) for k in range(widest // (a + 1))]
    return np.array([a for a, _ in pairs]), np.array([float(k) for _, k in pairs])


# ---------------------------------------------------------------- draws


def _uniform(seeds: Seeds, positions: Seeds) -> Floats:
    """Draws from (0, 1) that depend only on (seed, position)."""
    bits = _scramble(_scramble(seeds * _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    uniform: Floats = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniform


def _scramble(z: Seeds) -> Seeds:
    """The finaliser of SplitMix64 (Stafford's variant 13)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
