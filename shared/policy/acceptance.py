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
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shared.columns import Ints, pack, unpack
from shared.errors import ConfigError
from shared.perf.draft import Draft
from shared.policy.seam import Bools, Floats
from shared.policy.speculation import Candidates, draft_s, select
from shared.schemas import Selection

Seeds = NDArray[np.uint64]

# 2^64 / golden ratio, the increment of SplitMix64 (Steele, Lea, Flood 2014)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# a stream of numbers for each of the two draws: "top", "rank"
_STREAMS = np.array([0x746F70, 0x72616E6B], dtype=np.uint64)[:, None, None]
_FARTHEST = float(1 << 30)  # no tree is so wide


class Drafted(NamedTuple):
    """The trees of several requests, level by level. `true`: the nodes on the path of the target's
    own output.
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
        deepest, widest = int(depth.max(initial=0)), int(width[depth > 0].max(initial=1))
        positions: Seeds = (made[:, None] + np.arange(deepest)).astype(np.uint64)
        top, wanted = self._drawn(seeds[:, None], positions)
        grows = np.arange(deepest) < depth[:, None]
        if widest == 1:
            return _chains(top, wanted == 0.0, grows)
        return _beams(top, wanted, grows, np.maximum(width, 1), widest)

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
    seeds: Seeds,
    made: Ints,
    has: Ints,
    left: Ints,
    filled: Ints,
) -> Speculated:
    """Draft, select, verify. Selected nodes are connected, so the accepted nodes are those on the
    true path.

    Columns and `selection` run along the entries. `tokens`: the positions that each may compute.
    `made`: its output tokens. `has`: its KV positions. `filled`: its positions in the draft's KV,
    which has no other limit. `left`: the positions to compute before its next token. An entry with
    more than one left, or no token made yet, is prefilling, and drafts nothing.
    """
    planned, width = unpack(selection.depth), unpack(selection.width)
    speculates = (planned > 0) & (left == 1) & (made > 0)
    depth: Ints = np.where(speculates, planned, 0).astype(np.int32)
    candidates, true = acceptance.draft(seeds, made, depth, width)
    chosen = select(replace(selection, depth=pack(depth)), tokens, candidates)
    drafted, accepted = (
        np.bincount(candidates.entry[of], minlength=len(tokens)) for of in (chosen, chosen & true)
    )
    missing = (has + 1 - np.minimum(filled, has))[speculates]
    drafted_s = draft_s(
        draft,
        depth=depth[speculates],
        width=width[speculates],
        context=(has + 1)[speculates],
        missing=missing,
    )
    kept: Ints = np.where(speculates, accepted + 1, tokens).astype(np.int32)
    return Speculated(
        np.where(speculates, drafted + 1, tokens).astype(np.int32),
        kept,
        drafted.astype(np.int32),
        np.where(speculates, has + kept, filled).astype(np.int32),
        drafted_s,
    )


def some_of(selection: Selection, kept: Bools) -> Selection:
    """The selection of some entries of its plan."""
    return replace(
        selection,
        depth=pack(unpack(selection.depth)[kept]),
        width=pack(unpack(selection.width)[kept]),
        needed=np.frombuffer(selection.needed, dtype="<f4")[kept].tobytes(),
    )


# ---------------------------------------------------------------- trees


def _chains(top: Floats, first: Bools, grows: Bools) -> Drafted:
    """Trees without branches. `top`, `first`, `grows`: [entries, levels]."""
    entries, levels = top.shape
    node = np.full((entries, levels + 1), -1, dtype=np.int32)
    flat = grows.T.ravel()
    node[:, 1:].T[grows.T] = np.arange(np.count_nonzero(flat), dtype=np.int32)
    entry: Ints = np.tile(np.arange(entries, dtype=np.int32), levels)[flat]
    path: Floats = np.multiply.accumulate(top, axis=1).T.ravel()[flat]
    true: Bools = np.logical_and.accumulate(first, axis=1).T.ravel()[flat]
    return Drafted(Candidates(entry, node[:, :-1].T.ravel()[flat], path), true)


def _beams(top: Floats, wanted: Floats, grows: Bools, width: Ints, widest: int) -> Drafted:
    """Trees by beam search. `top`, `wanted`, `grows`: [entries, levels]."""
    entries, levels = top.shape
    rank = np.arange(widest)
    beams, all_entries = rank < width[:, None], np.arange(entries)[:, None]  # [entries, widest]
    node: Ints = np.full((entries, 1), -1, dtype=np.int32)  # of the level before
    path, true = np.ones((entries, 1)), np.ones((entries, 1), dtype=np.bool_)
    found: list[tuple[NDArray[np.int64], Ints, Floats, Bools]] = []
    nodes = 0
    for level in range(levels):
        chance = top[:, level, None] * (1.0 - top[:, level, None]) ** rank
        ahead = np.where(beams[:, None, :], path[:, :, None] * chance[:, None, :], -1.0).reshape(
            entries, -1
        )
        best = np.argsort(-ahead, axis=1, kind="stable")[:, :widest]
        above, place = np.divmod(best, widest)
        path = np.where(beams, ahead[all_entries, best], -1.0)
        true = true[all_entries, above] & (place == wanted[:, level, None])
        there = beams & grows[:, level, None]
        parent = node[all_entries, above]
        node = np.full((entries, widest), -1, dtype=np.int32)
        count = int(np.count_nonzero(there))
        node[there] = np.arange(nodes, nodes + count, dtype=np.int32)
        nodes += count
        found.append((np.nonzero(there)[0], parent[there], path[there], true[there]))
    entry, parents, paths, trues = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return Drafted(Candidates(entry.astype(np.int32), parents, paths), trues)


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
