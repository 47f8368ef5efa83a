"""Attention on a CPU that reads keys and values where they lie in the pool.

Chunks go stretch by stretch: torch's flash kernel attends over a view of the pool, and results
combine by their weights (the logsumexp of each). A chunk sees its own tokens directly. Decodes,
nodes of trees and short chunks go together, however scattered: a sparse matrix holds which query
sees which row, and two kernels compute scores and sums. Without these they are computed as chunks.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from services.worker.engines.torch.attention.attention import Branches, Node, Part
from services.worker.engines.torch.paged import Pool

# New tokens of a chunk up to which its rows are computed one by one, among the decodes. Measured on
# contexts of 64 to 1024 tokens, alone and eight at once: from 8 tokens on a window is as fast.
SHORT = 8

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _Window(NamedTuple):
    """Rows of the batch that see the same stretches of the pool; if `own`, each other causally."""

    first: int
    end: int
    stretches: Sequence[tuple[int, int]]
    own: bool


class _Pattern(NamedTuple):
    """The positions each query sees: a sparse matrix [rows * heads, pool positions * KV heads]."""

    scores: Tensor  # its values, overwritten by every layer
    matrix: Tensor
    columns: Tensor
    begins: Tensor  # [rows * heads], of each row in `columns`
    blocks: Sequence[Tensor]  # views of `scores`, [heads, length] of each row


class InPlaceBatch:
    """Lays out a batch whose KV is read in place. Implements Batch (attention.py)."""

    def __init__(
        self, pool: Pool, parts: Sequence[Part], writes: Tensor, positions: int, sparse: bool
    ) -> None:
        """`writes`: where new tokens go. `positions`: of the pool. `sparse`: see `sparse_works`."""
        self._pool = pool
        self._writes = writes
        self._positions = positions
        self._windows: list[_Window] = []
        self._together: list[NDArray[np.int64]] = []  # the pool positions that each row sees
        rows, row = [], 0
        nodes = [part.nodes() if isinstance(part, Branches) else [part] for part in parts]
        for part in itertools.chain.from_iterable(nodes):
            if isinstance(part, Node):
                if sparse:
                    self._together.append(part.sees)
                    rows.append(row)
                else:
                    self._windows.append(_Window(row, row + 1, _stretches(part.sees), False))
                row += 1
                continue
            cached, new, place = part
            if sparse and new <= SHORT:
                self._together += [place.positions(0, cached + n + 1) for n in range(new)]
                rows += range(row, row + new)
            elif new > 1:
                self._windows.append(_Window(row, row + new, place.within(0, cached), True))
            else:
                self._windows.append(_Window(row, row + 1, place.within(0, cached + 1), False))
            row += new
        self._rows = torch.tensor(rows) if self._windows and rows else None  # None: the whole batch
        self._patterns: dict[tuple[int, int], _Pattern] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        q, k, v = query[0], key[0], value[0]  # [heads, T, size]
        scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
        keys, values = self._pool.write(layer, self._writes, k.transpose(0, 1), v.transpose(0, 1))
        if not self._windows:
            return self._decodes(q, keys, values, scale)[None]
        out = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
        shared = (k.shape[0], q.shape[0] // k.shape[0])  # KV heads, heads that share one
        # [KV heads, group, T, size]
        q, k, v = q.view(*shared, *q.shape[1:]), k[:, None], v[:, None]
        rows = out.view(len(out), *shared, -1).permute(1, 2, 0, 3)
        for first, end, stretches, own in self._windows:
            asking = q[:, :, first:end]
            parts = [
                _seen(
                    asking,
                    keys[a:b].transpose(0, 1)[:, None],
                    values[a:b].transpose(0, 1)[:, None],
                    scale,
                )
                for a, b in stretches
            ]
            if own:
                parts.append(
                    _seen(asking, k[:, :, first:end], v[:, :, first:end], scale, causal=True)
                )
            rows[:, :, first:end] = parts[0][0] if len(parts) == 1 else _put_together(parts)
        if self._rows is not None:
            out[self._rows] = self._decodes(query[0], keys, values, scale)
        return out[None]

    def _decodes(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """query [heads, T, size] -> [B, heads, size], for the rows that are computed together."""
        heads, kv_heads = query.shape[0], keys.shape[1]
        pattern = self._patterns.get((heads, kv_heads))
        if pattern is None:
            pattern = self._patterns[heads, kv_heads] = self._pattern(heads, kv_heads)
        asking = query.transpose(0, 1)
        asking = (asking if self._rows is None else asking[self._rows]).reshape(-1, query.shape[2])
        torch.sparse.sampled_addmm(
            pattern.matrix,
            asking,
            keys.flatten(0, 1).t(),
            beta=0.0,
            alpha=scale,
            out=pattern.matrix,
        )
        for block in pattern.blocks:
            torch.softmax(block, -1, out=block)
        summed = embedding_bag(
            pattern.columns,
            values.flatten(0, 1),
            pattern.begins,
            mode="sum",
            per_sample_weights=pattern.scores,
        )
        return summed.view(-1, heads, values.shape[2])

    def _pattern(self, heads: int, kv_heads: int) -> _Pattern:
        lengths = np.array([len(sees) for sees in self._together])
        ends = np.zeros(len(lengths) * heads + 1, dtype=np.int32)
        np.cumsum(np.repeat(lengths, heads), out=ends[1:])
        columns = np.empty(int(ends[-1]), dtype=np.int32)
        of_head = _heads(heads, kv_heads)
        at = 0
        for sees, length in zip(self._together, lengths.tolist(), strict=True):
            end = at + heads * length
            np.add(
                sees * kv_heads,
                of_head,
                out=columns[at:end].reshape(heads, length),
                casting="unsafe",
            )
            at = end
        begins, places = torch.from_numpy(ends), torch.from_numpy(columns)
        size = (len(lengths) * heads, self._positions * kv_heads)
        matrix = torch.sparse_csr_tensor(
            begins, places, torch.zeros(len(columns)), size=size, check_invariants=False
        )
        scores = matrix.values()
        blocks = [
            part.view(heads, -1)
            for part in torch.split_with_sizes(scores, (lengths * heads).tolist())
        ]
        return _Pattern(scores, matrix, places, begins[:-1], blocks)


def _stretches(sees: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The stretches of consecutive positions."""
    breaks = np.flatnonzero(np.diff(sees) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(sees, breaks)]


@cache
def _heads(heads: int, kv_heads: int) -> NDArray[np.int64]:
    """[heads, 1]: the KV head of each query head."""
    return np.arange(heads)[:, None] // (heads // kv_heads)


def _seen(
    asking: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """asking [KV heads, group, n, size], keys and values [KV heads, 1, length, size] -> ([KV heads,
    group, n, size], logsumexp).
    """
    if asking.shape[2] == 1:  # the group stands in for rows
        out, weight = _flash(asking.transpose(1, 2), keys, values, scale=scale)
        return out.transpose(1, 2), weight.transpose(1, 2)
    group = asking.shape[1]
    return _flash(  # type: ignore[no-any-return]
        asking,
        keys.expand(-1, group, -1, -1),
        values.expand(-1, group, -1, -1),
        0.0,
        causal,
        scale=scale,
    )


def _put_together(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention over all positions, combined from attention over parts of them."""
    weights = torch.stack([weight for _, weight in parts]).softmax(dim=0)
    total = parts[0][0] * weights[0, ..., None]
    for (out, _), weight in zip(parts[1:], weights[1:], strict=True):
        total += out * weight[..., None]
    return total


@cache
def sparse_works(dtype: torch.dtype) -> bool:
    """Tells whether torch has the sparse kernels for this type, without its warning."""
    if dtype != torch.float32:
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, dtype=torch.int32)
        matrix = torch.sparse_csr_tensor(
            torch.tensor([0, 1], dtype=torch.int32), one, torch.zeros(1), size=(1, 2)
        )
        try:
            torch.sparse.sampled_addmm(
                matrix, torch.ones(1, 2), torch.ones(2, 2), beta=0.0, out=matrix
            )
        except RuntimeError:
            return False
    return bool(matrix.values()[0] == 2.0)
