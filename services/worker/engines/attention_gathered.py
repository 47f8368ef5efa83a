"""Attention on any device that torch knows: sequences are gathered from the pool, and decodes are
padded to the longest.

It copies what it reads, and serves devices and types for which attention_in_place.py has no
kernels.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.worker.engines.attention import Node, Part
from services.worker.engines.paged import Pool


class _Chunk(NamedTuple):
    rows: slice  # of the packed batch
    at: Tensor  # [cached + new] pool positions
    mask: Tensor | None  # [new, cached + new], None where causal from position 0


class _Decodes(NamedTuple):
    """Rows that see one position more than are cached: decodes, and the nodes of trees."""

    rows: Tensor  # [B] of the packed batch
    at: Tensor  # [B, longest] pool positions, padded
    mask: Tensor  # [B, 1, 1, longest]


class GatheredBatch:
    """Implements services.worker.engines.attention.Batch."""

    def __init__(
        self, pool: Pool, parts: Sequence[Part], writes: Tensor, device: torch.device
    ) -> None:
        """`writes`: the pool positions of new tokens."""
        self._pool = pool
        self._writes = writes
        self._chunks: list[_Chunk] = []
        singles: list[Tensor] = []
        rows, row = [], 0
        for part in parts:
            if isinstance(part, Node):
                singles.append(torch.from_numpy(part.sees).to(device))
                rows.append(row)
                row += 1
                continue
            cached, new, place = part
            length = cached + new
            at = torch.from_numpy(place.positions(0, length)).to(device)
            if new == 1:
                singles.append(at)
                rows.append(row)
            else:
                mask = (
                    torch.ones(new, length, dtype=torch.bool, device=device).tril(cached)
                    if cached
                    else None
                )
                self._chunks.append(_Chunk(slice(row, row + new), at, mask))
            row += new
        self._decodes = _padded(singles, rows, device) if singles else None

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
        if self._decodes is not None:
            rows, at, mask = self._decodes
            # [B, KV heads, longest, size]
            keys, values = (pool[at].transpose(1, 2) for pool in pools)
            # query heads that share a KV head stand in for query rows
            group = q.shape[1] // k.shape[1]
            asking = q[rows].view(-1, k.shape[1], group, q.shape[2])
            out[rows] = scaled_dot_product_attention(
                asking, keys, values, attn_mask=mask, scale=scale
            ).flatten(1, 2)
        return out[None]


def _padded(singles: Sequence[Tensor], rows: Sequence[int], device: torch.device) -> _Decodes:
    lengths = torch.tensor([len(at) for at in singles], device=device)
    padded = torch.nn.utils.rnn.pad_sequence(list(singles), batch_first=True)
    mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]
    return _Decodes(torch.tensor(rows, device=device), padded, mask[:, None, None, :])
