"""Attention of many short parts of a batch at once. Decodes, trees and short chunks are cut into
runs of equally many rows that see equally many positions: the missing ones are padding.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engines.torch.attention.attention import Branches, Node, Part, Piece

LONGEST_RUN = 16  # rows
_BITS = 62  # of a mask


class Run(NamedTuple):
    """Consecutive rows of a batch. `sees`: pool positions; every row sees the first `before`.
    `own`: of each row, which of the others it sees, bit by bit.
    """

    before: int
    own: Sequence[int]
    sees: NDArray[np.int64]


class Shape(NamedTuple):
    """The sizes that runs are padded to."""

    runs: int
    width: int  # rows of each
    longest: int  # positions that each sees


def runs_of(part: Part) -> list[Run]:
    """The runs of a part's rows, in their order."""
    match part:
        case Node(_, sees):
            return [Run(len(sees) - 1, (1,), sees)]
        case Branches(cached, sees, paths):
            if len(paths) > _BITS:
                return [run for node in part.nodes() for run in runs_of(node)]
            own = [sum(1 << node for node in path) for path in paths]
            return [
                Run(cached, own[begin : begin + LONGEST_RUN], sees)
                for begin in range(0, len(own), LONGEST_RUN)
            ]
        case Piece(cached, new, place):
            runs = []
            for begin in range(0, new, LONGEST_RUN):
                rows = min(LONGEST_RUN, new - begin)
                own = [(2 << row) - 1 for row in range(rows)]
                before = cached + begin
                runs.append(Run(before, own, place.positions(0, before + rows)))
            return runs


def shape_of(runs: Sequence[Run]) -> Shape:
    """The smallest shape that holds these runs."""
    return Shape(len(runs), max(len(run.own) for run in runs), max(len(run.sees) for run in runs))


def indices(runs: Sequence[Run], shape: Shape) -> tuple[NDArray[np.int64], ...]:
    """`place`: where each row lies among the rows of the shape. `at`: [runs, longest] pool
    positions. `before` [runs] and `own` [runs, width]: which of them a row sees. Padding holds any
    positions (behind the end of a run, in runs that are padding); its rows see at least one.
    """
    at = np.zeros((shape.runs, shape.longest), dtype=np.int64)
    before = np.zeros(shape.runs, dtype=np.int64)
    own = np.ones((shape.runs, shape.width), dtype=np.int64)
    place = []
    for n, run in enumerate(runs):
        rows = len(run.own)
        at[n] = run.sees[0]  # what it does not see is its own, too
        at[n, : len(run.sees)] = run.sees
        before[n] = run.before
        own[n, :rows] = run.own
        place.append(np.arange(n * shape.width, n * shape.width + rows))
    return np.concatenate(place), at, before, own


class PaddedRows:
    """The padded runs of one pass, laid out on the device once for all its layers."""

    def __init__(
        self, shape: Shape, place: Tensor, at: Tensor, before: Tensor, own: Tensor
    ) -> None:
        """The tensors of `indices`, flat or not."""
        self._shape = shape
        self._place = place
        self._at = at.view(shape.runs, shape.longest)
        self._before = before.view(shape.runs, 1, 1)
        self._own = own.view(shape.runs, shape.width, 1)
        self._bias: Tensor | None = None

    def attend(self, query: Tensor, pools: tuple[Tensor, Tensor], scale: float | None) -> Tensor:
        """`query`: [rows, heads, size], rows as in `place`. Gives [rows, heads, value size]."""
        runs, width, _ = self._shape
        rows, heads, size = query.shape
        kv_heads = pools[0].shape[1]
        group = heads // kv_heads
        as_they_are = rows == runs and width == 1
        if not as_they_are:
            query = query.new_zeros((runs * width, heads, size)).index_copy_(0, self._place, query)
        # heads that share a KV head as query rows: [runs, KV heads, group * width, size]
        query = query.view(runs, width, kv_heads, group, size).permute(0, 2, 3, 1, 4)
        query = query.reshape(runs, kv_heads, group * width, size)
        if self._bias is None:  # the same for every layer
            hidden = ~self._sees().repeat(1, group, 1)[:, None]
            self._bias = query.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        keys, values = (pool[self._at].transpose(1, 2) for pool in pools)
        seen = scaled_dot_product_attention(query, keys, values, attn_mask=self._bias, scale=scale)
        seen = seen.view(runs, kv_heads, group, width, -1).permute(0, 3, 1, 2, 4)
        seen = seen.reshape(runs * width, heads, -1)
        return seen if as_they_are else seen[self._place]

    def _sees(self) -> Tensor:
        """[runs, width, longest]"""
        behind = torch.arange(self._shape.longest, device=self._at.device) - self._before
        return (behind < 0) | ((self._own >> behind.clamp(0, _BITS)) & 1).bool()
