"""A seeded model of acceptance, for simulations and sim engines alike, which have neither a draft
nor a target: it says which drafts a target would accept.

At output position n of a request the draft gives its k-th likeliest token the probability q
(1-q)^k. The rank k of the token that the target wants there is drawn by the same law. So AdaServe's
assumption holds: a node is accepted with its path probability ([adaserve] Eq. 7). The top
probability q is drawn, too, from Beta(a, 1) with mean `probability` = a/(a+1), so that some
positions are easy and some are hard. Chains are accepted as in [slos-serve] appendix D: each token
with that mean, independently of the others. All draws depend on (seed of the request, n) alone:
schedules, batches and replicas change nothing. Both laws are choices of ours. `probability` is a
mean over a data set, as published acceptance figures are.
"""

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
_FARTHEST = float(1 << 30)  # no tree is so wide


class Drafted(NamedTuple):
    """The trees of several requests. `true`: the nodes on the path of the target's own output; axes
    as in `candidates`.
    """

    candidates: Candidates
    true: Bools


class Speculated(NamedTuple):
    """The speculation of one iteration of an engine. Columns run along its entries."""

    fills: Ints  # KV positions that it fills while it runs, those of rejected drafts included
    kept: Ints  # those of them that stay
    drafted: Ints  # draft tokens verified
    filled: Ints  # positions in the draft's KV afterwards
    drafted_s: float  # before the target's pass


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
        width = np.maximum(width, 1)
        deepest, widest = int(depth.max(initial=0)), int(width[depth > 0].max(initial=1))
        levels = np.arange(deepest)[:, None]
        top, wanted = self._drawn(seeds, (levels + made).astype(np.uint64))
        there = (levels < depth)[:, :, None] & (np.arange(widest) < width[:, None])
        path, true = _chains(top, wanted) if widest == 1 else _beams(top, wanted, width, widest)
        return Drafted(Candidates(depth, there, path), true & there)

    def _drawn(self, seeds: Seeds, positions: Seeds) -> tuple[Floats, Floats]:
        """The draft's top probability at each position, and the rank that it gives to the target's
        token.
        """
        drawn = _uniform(seeds ^ _STREAMS, positions)
        top: Floats = drawn[0] ** ((1.0 - self.probability) / self.probability)
        with np.errstate(divide="ignore"):  # top 1: rank 0
            rank = np.log(drawn[1]) / np.log1p(-top)
        return top, np.floor(np.minimum(rank, _FARTHEST))


def speculate(
    draft: Draft,
    acceptance: Acceptance,
    selection: Selection,
    tokens: Ints,
    *,
    needed: Needs,
    seeds: Seeds,
    made: Ints,
    has: Ints,
    left: Ints,
    filled: Ints,
    longest_chain: int = 0,
) -> Speculated:
    """Draft, select, verify. Selected nodes are connected, so the accepted nodes are those on the
    true path. `longest_chain`: the engine verifies chains of so many drafts at most, and chooses
    their lengths before it drafts, all as deep as the deepest (vLLM); 0: it verifies trees.

    Columns and `selection` run along the entries. `tokens`: the positions that each may compute.
    `needed`: by its pace. `made`: its output tokens. `has`: its KV positions. `filled`: its
    positions in the draft's KV, which has no other limit. `left`: the positions to compute before
    its next token. An entry with more than one left, or no token made yet, is prefilling, and
    drafts nothing.
    """
    planned, width = unpack(selection.depth), unpack(selection.width)
    speculates = (planned > 0) & (left == 1) & (made > 0)
    depth: Ints = np.where(speculates, planned, 0)
    if longest_chain:
        most: Ints = np.where(speculates, np.minimum(tokens, 1 + longest_chain), 1)
        depth, width = depths_of(selection, most, needed), np.ones_like(width)
    candidates, true = acceptance.draft(seeds, made, depth, width)
    chosen = candidates.there if longest_chain else select(selection, tokens, needed, candidates)
    drafted: Ints = chosen.sum(axis=(0, 2), dtype=np.int32)
    accepted: Ints = (chosen & true).sum(axis=(0, 2), dtype=np.int32)
    context, drafts = has + 1, depth > 0
    drafting = drafts.nonzero()[0]
    drafted_s = draft_s(
        draft,
        depth=depth[drafting],
        width=width[drafting],
        context=context[drafting],
        missing=(context - np.minimum(filled, has))[drafting],
        together=longest_chain > 0,
    )
    kept: Ints = np.where(speculates, accepted + 1, tokens)
    return Speculated(
        np.where(speculates, drafted + 1, tokens),
        kept,
        drafted,
        np.where(drafts, has + kept, filled),
        drafted_s,
    )


# ---------------------------------------------------------------- trees


def _chains(top: Floats, wanted: Floats) -> tuple[Floats, Bools]:
    """Trees without branches. `top`, `wanted`: [levels, entries]."""
    true: Bools = np.logical_and.accumulate(wanted == 0.0, axis=0)
    return np.multiply.accumulate(top, axis=0)[:, :, None], true[:, :, None]


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
    # the root alone is extended first, and its extensions come first, from the likeliest down
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
    """Draws from (0, 1) that depend on (seed, position) alone."""
    bits = _scramble(_scramble(seeds * _GOLDEN) + (positions + np.uint64(1)) * _GOLDEN)
    uniform: Floats = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return uniform


def _scramble(z: Seeds) -> Seeds:
    """The finaliser of SplitMix64 (Stafford's variant 13)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
