"""Attention on any device that torch knows: what a batch sees is gathered from the pool.

Short parts are computed together (padded_rows.py), each longer chunk alone. It copies what it
reads, and serves devices and types for which attention_in_place.py has no kernels. All positions
reach the device in one copy.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engines.attention import Part, Piece, rows_of
from services.worker.engines.padded_rows import LONGEST_RUN, PaddedRows, indices, runs_of, shape_of
from services.worker.engines.paged import Pool


class _Chunk(NamedTuple):
    rows: slice  # of the packed batch
    at: Tensor  # [cached + new] pool positions
    mask: Tensor | None  # [new, cached + new], None where causal from position 0


class GatheredBatch:
    """Implements services.worker.engines.attention.Batch."""

    def __init__(
        self, pool: Pool, parts: Sequence[Part], writes: Tensor, device: torch.device
    ) -> None:
        """`writes`: the pool positions of new tokens."""
        self._pool = pool
        self._writes = writes
        begins = [0, *itertools.accumulate(map(rows_of, parts))]
        runs, short, chunks, columns = [], [], list[slice](), []
        for part, begin, end in zip(parts, begins, begins[1:], strict=False):
            if isinstance(part, Piece) and part.new > LONGEST_RUN:
                chunks.append(slice(begin, end))
                columns.append(part.place.positions(0, part.cached + part.new))
            else:
                runs += runs_of(part)
                short.append(np.arange(begin, end))
        if runs:
            shape = shape_of(runs)
            columns += [np.concatenate(short), *map(np.ravel, indices(runs, shape))]
        there = torch.split_with_sizes(
            torch.from_numpy(np.concatenate(columns)).to(device), [*map(len, columns)]
        )
        self._chunks = [_chunk(rows, at) for rows, at in zip(chunks, there, strict=False)]
        self._padded: tuple[Tensor, PaddedRows] | None = None  # of which rows
        if runs:
            of_rows, *of_runs = there[len(chunks) :]
            self._padded = of_rows, PaddedRows(shape, *of_runs)

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
        if self._padded is not None:
            rows, padded = self._padded
            out[rows] = padded.attend(q[rows], pools, scale)
        return out[None]


def _chunk(rows: slice, at: Tensor) -> _Chunk:
    new, length = rows.stop - rows.start, len(at)
    mask = None
    if new < length:
        mask = torch.ones(new, length, dtype=torch.bool, device=at.device).tril(length - new)
    return _Chunk(rows, at, mask)
