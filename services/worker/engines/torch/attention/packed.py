"""Attention of many chunks and decodes in one call of flash attention, which a GPU has for half
precision. The positions they see are gathered, one sequence behind the other, without padding. The
mask is causal and ends with each sequence, so chunks on cached tokens need no mask of their own.
"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engines.torch.attention.attention import Piece

# kernel(query [rows, heads, size], keys and values [positions, KV heads, size], where the rows of
# each sequence begin [sequences + 1], where its positions begin, the most rows of a sequence, the
# most positions, scale) -> [rows, heads, size]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float | None], Tensor]


def flash(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    row_begins: Tensor,
    begins: Tensor,
    most_rows: int,
    most: int,
    scale: float | None,
) -> Tensor:
    """Implements Kernel (above) on CUDA, in float16 and bfloat16. Else raises RuntimeError."""
    causal = True
    out: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, row_begins, begins, most_rows, most, 0.0, causal, False, scale=scale
    )[0]
    return out


class PackedPieces:
    """The pieces of one pass, laid out on the device once for all its layers."""

    def __init__(
        self, pieces: Sequence[Piece], rows: Tensor, at: Tensor, begins: Tensor, kernel: Kernel
    ) -> None:
        """`rows`, `at` and `begins` are as `columns` gives them."""
        self._rows, self._at, self._kernel = rows, at, kernel
        self._row_begins, self._begins = begins.to(torch.int32).view(2, -1).unbind()
        self._most_rows = max(piece.new for piece in pieces)
        self._most = max(piece.cached + piece.new for piece in pieces)

    def attend(
        self, query: Tensor, pools: tuple[Tensor, Tensor], out: Tensor, scale: float | None
    ) -> None:
        """`query`: [T, heads, size], all rows of the batch. Writes the pieces' rows of `out`."""
        keys, values = (pool.index_select(0, self._at) for pool in pools)
        seen = self._kernel(
            query.index_select(0, self._rows),
            keys,
            values,
            self._row_begins,
            self._begins,
            self._most_rows,
            self._most,
            scale,
        )
        out.index_copy_(0, self._rows, seen)


def columns(pieces: Sequence[Piece], rows: Sequence[range]) -> list[NDArray[np.int64]]:
    """The rows of the pieces, the pool positions that they see, and where each piece begins."""
    seen = [piece.cached + piece.new for piece in pieces]
    return [
        np.concatenate([np.arange(of.start, of.stop) for of in rows]),
        np.concatenate(
            [piece.place.positions(0, n) for piece, n in zip(pieces, seen, strict=True)]
        ),
        np.array(
            [
                *itertools.accumulate((piece.new for piece in pieces), initial=0),
                *itertools.accumulate(seen, initial=0),
            ]
        ),
    ]
