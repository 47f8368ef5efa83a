"""KV in the host's memory: blocks that left the GPU, by the hash of their text. They come back to
free blocks when a request begins with them.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.errors import ConfigError

PIECE = 128  # blocks that are copied together at most
ROUNDS = 3  # of the measurement; the fastest counts


class HostKv:
    """`blocks` of them at most: that which came longest ago gives way. `pools`: the keys and values
    of each layer on the GPU, where block n has the positions from n * block_tokens on.

    What leaves is copied in `flush`, which comes before its block is written again.
    """

    def __init__(self, blocks: int, block_tokens: int, pools: Sequence[Tensor]) -> None:
        """Raises ConfigError where the host has no memory for it."""
        self.blocks, self._block_tokens, self._pools = blocks, block_tokens, pools
        self._device = self._pools[0].device
        self._widths = [block_tokens * each[0].numel() for each in self._pools]
        shape, rows = sum(self._widths), blocks + PIECE  # those that are on their way back
        try:
            self._rows = torch.empty(
                rows, shape, dtype=self._pools[0].dtype, pin_memory=self._device.type == "cuda"
            )
        except RuntimeError as error:
            gib = rows * shape * self._pools[0].dtype.itemsize / (1 << 30)
            raise ConfigError(
                f"host_kv_tokens {blocks * block_tokens}: no {gib:.1f} GiB of memory for them"
            ) from error
        self._free = list(range(rows))
        self._row_of: OrderedDict[bytes, int] = OrderedDict()
        self._leaving: dict[int, int] = {}  # block of the GPU, by row
        self.loaded_s = 0.0  # since it was last set to 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._row_of

    def put(self, digest: bytes, block: int) -> bytes | None:
        """A block of the GPU with this hash gives way. Returns the hash that gives way here."""
        gone = None
        if len(self._row_of) == self.blocks:
            gone, row = self._row_of.popitem(last=False)
            self._free.append(row)
        self._row_of[digest] = row = self._free.pop()
        self._leaving[row] = block
        return gone

    def drop(self, digest: bytes) -> None:
        self._free.append(self._row_of.pop(digest))

    def forget(self) -> None:
        self._free += self._row_of.values()
        self._row_of.clear()
        self._leaving.clear()

    def take(self, digests: Sequence[bytes]) -> list[int]:
        """At most PIECE of these come back. Returns the rows for `load`."""
        return [self._row_of.pop(each) for each in digests]

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these rows to these blocks."""
        began_s = time.monotonic()
        self.flush()
        staged = self._staging(len(rows))
        for place, row in zip(staged, rows, strict=True):
            place.copy_(self._rows[row], non_blocking=True)
        positions = self._positions(blocks)
        parts = torch.split_with_sizes(staged, self._widths, dim=1)
        for pool, part in zip(self._pools, parts, strict=True):
            pool.index_copy_(0, positions, part.reshape(len(positions), *pool.shape[1:]))
        self._free += rows
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.loaded_s += time.monotonic() - began_s

    def flush(self) -> None:
        """Copy what has left, while it is there."""
        leaving, self._leaving = list(self._leaving.items()), {}
        for first in range(0, len(leaving), PIECE):
            some = leaving[first : first + PIECE]
            positions, staged = self._positions([block for _, block in some]), []
            for pool, width in zip(self._pools, self._widths, strict=True):
                staged.append(pool.index_select(0, positions).reshape(len(some), width))
            for (row, _), values in zip(some, torch.cat(staged, dim=1), strict=True):
                self._rows[row].copy_(values, non_blocking=True)

    @torch.inference_mode()
    def token_load_s(self) -> float:
        """The seconds for a token to come back, measured. The pool's blocks hold nothing yet."""
        positions = len(self._pools[0]) // self._block_tokens * self._block_tokens
        blocks = list(range(min(PIECE, positions // self._block_tokens)))
        took_s = []
        for _ in range(ROUNDS):
            self.loaded_s = 0.0
            rows = [self._free.pop() for _ in blocks]
            self.load(rows, blocks)
            took_s.append(self.loaded_s)
        self.loaded_s = 0.0
        return min(took_s) / (len(blocks) * self._block_tokens)

    def check(self) -> None:
        """Raises AssertionError unless each row is free or has one hash."""
        rows = [*self._free, *self._row_of.values()]
        assert sorted(rows) == list(range(len(self._rows))), "a row is lost, or in two places"
        assert len(self._row_of) <= self.blocks

    def _staging(self, blocks: int) -> Tensor:
        return torch.empty(blocks, sum(self._widths), dtype=self._rows.dtype, device=self._device)

    def _positions(self, blocks: Sequence[int]) -> Tensor:
        size = self._block_tokens
        first = torch.tensor(blocks, device=self._device) * size
        return (first[:, None] + torch.arange(size, device=self._device)).flatten()
