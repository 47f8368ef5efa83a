"""Token trees: the drafts made for several requests, and the tree verified for one request."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.engines.torch.attention.attention import Branches, Part, Piece
from services.worker.engines.torch.paged import Place
from shared.columns import Ints
from shared.policy.seam import Bools
from shared.policy.speculation import Candidates


class Drafted(NamedTuple):
    """The candidates of several requests. `tokens`, and `above`, the beam of the level before that
    each extends, have the axes of the candidates: [levels, requests, beams].
    """

    candidates: Candidates
    tokens: Ints
    above: Ints


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's newest token, the root, and the drafts to verify behind it. A node comes after
    the node that it extends; the likeliest path comes first.
    """

    tokens: list[int]
    paths: list[tuple[int, ...]]  # of each node, the nodes from the root to it, itself the last
    beams: list[tuple[int, int]]  # of each node, its level and beam in `Drafted`
    children: dict[tuple[int, int], int]  # (node, token) -> node

    @property
    def drafts(self) -> int:
        return len(self.tokens) - 1

    def root(self) -> "Tree":
        return Tree(self.tokens[:1], self.paths[:1], self.beams[:1], {})

    def child(self, node: int, token: int) -> int | None:
        """The node that extends `node` by `token`, if it was drafted."""
        return self.children.get((node, token))

    def parts(self, place: Place, cached: int) -> list[Part]:
        """The tree as parts of a batch. Node n lies at position `cached` + n of `place`, which has
        room for it, and stands behind the `cached` tokens and its own path.
        """
        if self.paths[-1] == tuple(range(len(self.tokens))):
            return [Piece(cached, len(self.tokens), place)]
        return [Branches(cached, place.positions(0, cached + len(self.tokens)), self.paths)]


def trees_of(roots: Sequence[int], drafted: Drafted, chosen: Bools) -> list[Tree]:
    """The tree of each request. `roots`: newest tokens. `chosen`: [levels, requests, beams]."""
    tokens, above = drafted.tokens.tolist(), drafted.above.tolist()
    # of each request, the nodes below each: level and beam
    children: list[dict[tuple[int, int], list[tuple[int, int]]]]
    children = [defaultdict(list) for _ in roots]
    for level, request, beam in zip(*(axis.tolist() for axis in chosen.nonzero()), strict=True):
        children[request][level - 1, above[level][request][beam]].append((level, beam))
    trees = []
    for request, (root, below) in enumerate(zip(roots, children, strict=True)):
        tree = Tree([root], [(0,)], [(-1, 0)], {})
        ahead = [(0, child) for child in reversed(below[-1, 0])]
        while ahead:
            of, (level, beam) = ahead.pop()
            node, token = len(tree.tokens), tokens[level][request][beam]
            tree.tokens.append(token)
            tree.paths.append((*tree.paths[of], node))
            tree.beams.append((level, beam))
            tree.children[of, token] = node
            ahead += [(node, child) for child in reversed(below[level, beam])]
        trees.append(tree)
    return trees
