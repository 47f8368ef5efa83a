"""Paged KV for the torch engine, and the attention that transformers' models call in place of their own.

One forward pass carries a whole mixed batch as a single row of T packed tokens. Every layer writes the batch's keys and
values into a pool of blocks, then each sequence attends over its own blocks: chunks one by one, decodes all together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from shared.errors import ConfigError

NAME = "slackline_paged"  # what `attn_implementation` is set to


class Blocks:
    """Which block is whose. Ids 0..total-1; the last freed is the first reused."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self._free = list(range(total - 1, -1, -1))
        self._block_tokens = block_tokens

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, held: list[int], tokens: int) -> None:
        """Extend `held` until it has room for `tokens` positions."""
        missing = -(-tokens // self._block_tokens) - len(held)
        assert missing <= len(self._free), "more KV blocks promised than there are"
        held.extend(self._free.pop() for _ in range(missing))

    def release(self, held: list[int]) -> None:
        self._free.extend(held)
        held.clear()


class Piece(NamedTuple):
    """`new` tokens of one sequence, standing on `cached` ones; `blocks` has room for both."""

    cached: int
    new: int
    blocks: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice  # of the packed batch
    places: Tensor  # [cached + new] pool positions
    mask: Tensor | None  # [new, cached + new], None where causal from position 0


@dataclass(frozen=True, slots=True)
class _Decodes:
    rows: Tensor  # [B] of the packed batch
    places: Tensor  # [B, longest] pool positions, padded
    mask: Tensor  # [B, 1, 1, longest]


class Pool:
    """Keys and values of every layer: [blocks * block_tokens, KV heads, head size], made when the layer first writes."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._positions = blocks * block_tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def used(self) -> bool:
        return bool(self._layers)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's pools; `key` and `value` ([T, heads, size]) say of what kind."""
        if index not in self._layers:
            self._layers[index] = (key.new_zeros((self._positions, *key.shape[1:])), value.new_zeros((self._positions, *value.shape[1:])))
        return self._layers[index]

    def places(self, blocks: Sequence[int], tokens: int, device: torch.device) -> Tensor:
        """[tokens]: where positions 0..tokens-1 of a sequence are."""
        starts = torch.tensor(blocks[: -(-tokens // self._block_tokens)], device=device) * self._block_tokens
        return (starts[:, None] + torch.arange(self._block_tokens, device=device)).flatten()[:tokens]


class Batch:
    """The layout of one forward pass, the same for every layer."""

    def __init__(self, pool: Pool, pieces: Sequence[Piece], device: torch.device) -> None:
        self.pool = pool
        self.chunks: list[_Chunk] = []
        writes, singles, rows, row = [], [], [], 0
        for cached, new, blocks in pieces:
            length = cached + new
            places = pool.places(blocks, length, device)
            writes.append(places[cached:])
            if new == 1:
                singles.append(places)
                rows.append(row)
            else:
                mask = torch.ones(new, length, dtype=torch.bool, device=device).tril(cached) if cached else None
                self.chunks.append(_Chunk(slice(row, row + new), places, mask))
            row += new
        self.writes = torch.cat(writes)
        self.decodes = self._decodes(singles, rows, device) if singles else None

    @staticmethod
    def _decodes(singles: Sequence[Tensor], rows: Sequence[int], device: torch.device) -> _Decodes:
        lengths = torch.tensor([len(places) for places in singles], device=device)
        padded = torch.nn.utils.rnn.pad_sequence(list(singles), batch_first=True)
        mask = torch.arange(padded.shape[1], device=device) < lengths[:, None]
        return _Decodes(torch.tensor(rows, device=device), padded, mask[:, None, None, :])


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    slackline_batch: Batch | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, size], key and value [1, KV heads, T, size] -> [1, T, heads, size]. T runs over the packed batch.

    Raises: ConfigError for a model whose attention is not plain causal attention.
    """
    unknown = [name for name in ("sliding_window", "softcap", "s_aux", "position_bias") if rest.get(name) is not None]
    if unknown or slackline_batch is None:
        raise ConfigError(f"this engine computes plain causal attention; the model wants {unknown or 'another way of being called'}")
    batch = slackline_batch
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, size]
    keys, values = batch.pool.layer(int(module.layer_idx), k, v)  # type: ignore[arg-type]
    keys[batch.writes], values[batch.writes] = k, v
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for chunk in batch.chunks:
        seen_keys, seen_values = (pool[chunk.places].transpose(0, 1) for pool in (keys, values))
        out[chunk.rows] = scaled_dot_product_attention(
            q[chunk.rows].transpose(0, 1)[None],
            seen_keys[None],
            seen_values[None],
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
            scale=scaling,
            enable_gqa=True,
        )[0].transpose(0, 1)
    if batch.decodes is not None:
        rows, places = batch.decodes.rows, batch.decodes.places
        seen_keys, seen_values = (pool[places].transpose(1, 2) for pool in (keys, values))  # [B, KV heads, longest, size]
        group = q.shape[1] // k.shape[1]  # query heads that share a KV head stand in for query rows
        grouped = q[rows].view(-1, k.shape[1], group, q.shape[2])  # [B, KV heads, group, size]
        attended = scaled_dot_product_attention(grouped, seen_keys, seen_values, attn_mask=batch.decodes.mask, scale=scaling)
        out[rows] = attended.flatten(1, 2)
    return out[None], None


def _no_mask(*_: object, **__: object) -> None:
    """The batch's layout says who sees whom."""


def register() -> None:
    """Make NAME known to transformers; harmless when repeated."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
