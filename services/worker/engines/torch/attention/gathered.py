"""Attention on any device: the KV that a batch sees is copied from the KV pool (paged.py). Chunks
and decodes are computed by a kernel for packed sequences where the device has one (packed.py); else
short ones together, as trees are (padded_rows.py), and longer ones one by one. All positions reach
the device in one copy.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engines.torch.attention.attention import Part, Piece, rows_of
from services.worker.engines.torch.attention.packed import Kernel, PackedPieces, columns
from services.worker.engines.torch.attention.padded_rows import (
    LONGEST_RUN,
    PaddedRows,
    Run,
    indices,
    runs_of,
    shape_of,
)
from services.worker.engines.torch.paged import Pool


class _Chunk(NamedTuple):
    rows: slice  # of the packed batch
    at: Tensor  # [cached + new] pool positions
    mask: Tensor | None  # [new, cached + new], None where causal from position 0


class _Band(NamedTuple):
    runs: list[Run]
    rows: list[NDArray[np.int64]]  # of the packed batch, of each part


class GatheredBatch:
    """Lays out a batch whose KV is gathered. Implements Batch (attention.py)."""

    def __init__(
        self,
        pool: Pool,
        parts: Sequence[Part],
        writes: Tensor,
        device: torch.device,
        kernel: Kernel | None = None,
    ) -> None:
        """`writes`: the pool positions of new tokens. `kernel`: one that packs pieces, or None."""
        self._pool = pool
        self._writes = writes
        begins = [0, *itertools.accumulate(map(rows_of, parts))]
        pieces, rows_of_pieces = list[Piece](), list[range]()  # packed, or each alone
        # short parts by the binary digits of their length, so that none is padded to twice as much
        bands = defaultdict[int, _Band](lambda: _Band([], []))
        for part, begin, end in zip(parts, begins, begins[1:], strict=False):
            if isinstance(part, Piece) and (kernel is not None or part.new > LONGEST_RUN):
                pieces.append(part)
                rows_of_pieces.append(range(begin, end))
            else:
                runs = runs_of(part)
                band = bands[len(runs[-1].sees).bit_length()]
                band.runs.extend(runs)
                band.rows.append(np.arange(begin, end))
        sent = list[NDArray[np.int64]]()
        if pieces and kernel is not None:
            sent += columns(pieces, rows_of_pieces)
        else:
            sent += [piece.place.positions(0, piece.cached + piece.new) for piece in pieces]
        shapes = [shape_of(band.runs) for band in bands.values()]
        for band, shape in zip(bands.values(), shapes, strict=True):
            sent.append(np.concatenate(band.rows))
            sent += map(np.ravel, indices(band.runs, shape))
        rest = iter(
            torch.split_with_sizes(
                torch.from_numpy(np.concatenate(sent)).to(device), [*map(len, sent)]
            )
        )
        self._packed: PackedPieces | None = None
        self._chunks = list[_Chunk]()
        if pieces and kernel is not None:
            self._packed = PackedPieces(pieces, next(rest), next(rest), next(rest), kernel)
        else:
            self._chunks = [_chunk(slice(of.start, of.stop), next(rest)) for of in rows_of_pieces]
        self._padded = [  # of which rows
            (next(rest), PaddedRows(shape, next(rest), next(rest), next(rest), next(rest)))
            for shape in shapes
        ]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, size]
        pools = self._pool.write(layer, self._writes, k, v)
        out = q.new_empty((*q.shape[:2], v.shape[2]))
        for chunk in self._chunks:
            keys, values = (pool[chunk.at].transpose(0, 1)[None] for pool in pools)
            asking = q[chunk.rows].transpose(0, 1)[None]
            causal = chunk.mask is None
            seen = scaled_dot_product_attention(
                asking,
                keys,
                values,
                attn_mask=chunk.mask,
                is_causal=causal,
                scale=scale,
                enable_gqa=True,
            )
            out[chunk.rows] = seen[0].transpose(0, 1)
        if self._packed is not None:
            self._packed.attend(q, pools, out, scale)
        for rows, padded in self._padded:
            out[rows] = padded.attend(q[rows], pools, scale)
        return out[None]


def _chunk(rows: slice, at: Tensor) -> _Chunk:
    new, length = rows.stop - rows.start, len(at)
    mask = None
    if new < length:
        mask = torch.ones(new, length, dtype=torch.bool, device=at.device).tril(length - new)
    return _Chunk(rows, at, mask)
