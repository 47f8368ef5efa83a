"""Tests of attention over padded rows: each row attends to its own positions and to no others."""

from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from services.worker.engines.torch.attention.attention import Branches, Node, Part, Piece  # noqa: E402
from services.worker.engines.torch.attention.padded_rows import (  # noqa: E402
    PaddedRows,
    Shape,
    indices,
    runs_of,
    shape_of,
)
from services.worker.engines.torch.paged import Blocks, Place  # noqa: E402

HEADS, KV_HEADS, SIZE, POSITIONS = 4, 2, 8, 400


def tree(rng: Random, nodes: int) -> list[tuple[int, ...]]:
    """The paths of a random tree; a node comes after the one that it extends."""
    paths: list[tuple[int, ...]] = [(0,)]
    for node in range(1, nodes):
        paths.append((*rng.choice(paths), node))
    return paths


def nodes_of(part: Part) -> list[Node]:
    """Each row of the part by itself."""
    if isinstance(part, Piece):
        ends = range(part.cached + 1, part.cached + part.new + 1)
        return [Node(end - 1, part.place.positions(0, end)) for end in ends]
    return part.nodes() if isinstance(part, Branches) else [part]


@pytest.mark.parametrize("nodes", [2, 16, 17, 62, 63, 80])
def test_each_row_sees_its_own_positions_and_nothing_else(nodes: int) -> None:
    """Another sequence's numbers are NaN here: a row that saw one would be NaN."""
    rng, blocks = Random(nodes), Blocks(POSITIONS, 1)
    torch.manual_seed(nodes)
    places = [Place(1, 200) for _ in range(4)]
    for place, length in zip(places, (3, 40, 9, 11 + nodes), strict=True):
        assert blocks.grow(place, length)
    foreign, chunked, decoding, drafted = places
    parts: list[Part] = [
        Piece(5, 35, chunked),
        Piece(8, 1, decoding),
        Branches(11, drafted.positions(0, 11 + nodes), tree(rng, nodes)),
    ]
    keys, values = torch.randn(2, POSITIONS, KV_HEADS, SIZE)
    for pool in (keys, values):
        pool[foreign.positions(0, 3)] = torch.nan
    alone = [node for part in parts for node in nodes_of(part)]
    query = torch.randn(len(alone), HEADS, SIZE)
    runs = [run for part in parts for run in runs_of(part)]
    least = shape_of(runs)
    for shape in (least, Shape(least.runs + 3, least.width + 1, 2 * least.longest)):
        padded = PaddedRows(shape, *map(torch.from_numpy, indices(runs, shape)))
        seen = padded.attend(query, (keys, values), None)
        for row, node in enumerate(alone):
            for head in range(HEADS):
                of = head // (HEADS // KV_HEADS)
                scores = keys[node.sees, of] @ query[row, head] / np.sqrt(SIZE)
                wanted = scores.softmax(0) @ values[node.sees, of]
                torch.testing.assert_close(seen[row, head], wanted, atol=1e-5, rtol=1e-4)
