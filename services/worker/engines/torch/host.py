"""KV outside of the GPU: blocks as rows, and those that the host's memory keeps, by the hash of
their text. These come back to free blocks when a request begins with them.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shared.errors import ConfigError

PIECE = 128  # blocks that are copied together at most
ROUNDS = 3  # of the measurement; the fastest counts


class BlockRows:
    """Blocks of the GPU as rows of keys and values of all layers. `pools`: the keys and values of
    each layer, where block n has the positions from n * block_tokens on.
    """

    def __init__(self, block_tokens: int, pools: Sequence[Tensor]) -> None:
        self.block_tokens, self._pools = block_tokens, pools
        self.device, self.dtype = pools[0].device, pools[0].dtype
        self._widths = [block_tokens * each[0].numel() for each in pools]
        self.width = sum(self._widths)
        self.blocks = len(pools[0]) // block_tokens

    def read(self, blocks: Sequence[int]) -> Tensor:
        """[blocks, width], on the GPU."""
        at = self._positions(blocks)
        parts = [
            pool.index_select(0, at).reshape(len(blocks), width)
            for pool, width in zip(self._pools, self._widths, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def write(self, blocks: Sequence[int], rows: Tensor) -> None:
        """`rows` are on the GPU."""
        at = self._positions(blocks)
        parts = torch.split_with_sizes(rows, self._widths, dim=1)
        for pool, part in zip(self._pools, parts, strict=True):
            pool.index_copy_(0, at, part.reshape(len(at), *pool.shape[1:]))

    def take_out(self, blocks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy these blocks to memory elsewhere."""
        put(self.read(blocks), into)

    def bring_in(self, blocks: Sequence[int], payloads: Sequence[memoryview]) -> None:
        """Copy memory of elsewhere to these blocks."""
        staged = torch.empty(len(blocks), self.width, dtype=self.dtype)
        for row, payload in zip(staged.view(torch.uint8).numpy(), payloads, strict=True):
            row[:] = np.frombuffer(payload, dtype=np.uint8)
        self.write(blocks, staged.to(self.device))

    def _positions(self, blocks: Sequence[int]) -> Tensor:
        first = torch.tensor(blocks, device=self.device) * self.block_tokens
        return (first[:, None] + torch.arange(self.block_tokens, device=self.device)).flatten()


def put(rows: Tensor, into: Sequence[memoryview]) -> None:
    """Copy the bytes of each row to its place."""
    for row, place in zip(rows.cpu().view(torch.uint8).numpy(), into, strict=True):
        np.frombuffer(place, dtype=np.uint8)[:] = row


class HostKv:
    """`blocks` of them at most: that which came longest ago gives way. What leaves the GPU is
    copied in `flush`, which comes before its block is written again.
    """

    def __init__(self, blocks: int, on_gpu: BlockRows) -> None:
        """Raises ConfigError where the host has no memory for it."""
        self.blocks, self._on_gpu = blocks, on_gpu
        rows, shape, block_tokens = blocks + PIECE, on_gpu.width, on_gpu.block_tokens
        try:
            self._rows = torch.empty(  # some for those that are on their way back
                rows, shape, dtype=on_gpu.dtype, pin_memory=on_gpu.device.type == "cuda"
            )
        except RuntimeError as error:
            gib = rows * shape * on_gpu.dtype.itemsize / (1 << 30)
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

    def row(self, digest: bytes) -> Tensor | None:
        """The block that is kept under this hash."""
        self.flush()
        row = self._row_of.get(digest)
        return None if row is None else self._rows[row]

    def take(self, digests: Sequence[bytes]) -> list[int]:
        """At most PIECE of these come back. Returns the rows for `load`."""
        return [self._row_of.pop(each) for each in digests]

    def load(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy these rows to these blocks."""
        began_s = time.monotonic()
        self.flush()
        device = self._on_gpu.device
        staged = torch.empty(len(rows), self._on_gpu.width, dtype=self._rows.dtype, device=device)
        for place, row in zip(staged, rows, strict=True):
            place.copy_(self._rows[row], non_blocking=True)
        self._on_gpu.write(blocks, staged)
        self._free += rows
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.loaded_s += time.monotonic() - began_s

    def flush(self) -> None:
        """Copy what has left, while it is there."""
        leaving, self._leaving = list(self._leaving.items()), {}
        for first in range(0, len(leaving), PIECE):
            some = leaving[first : first + PIECE]
            staged = self._on_gpu.read([block for _, block in some])
            for (row, _), values in zip(some, staged, strict=True):
                self._rows[row].copy_(values, non_blocking=True)

    @torch.inference_mode()
    def token_load_s(self) -> float:
        """The seconds for a token to come back, measured. The pool's blocks hold nothing yet."""
        blocks = list(range(min(PIECE, self._on_gpu.blocks)))
        took_s = []
        for _ in range(ROUNDS):
            self.loaded_s = 0.0
            rows = [self._free.pop() for _ in blocks]
            self.load(rows, blocks)
            took_s.append(self.loaded_s)
        self.loaded_s = 0.0
        return min(took_s) / (len(blocks) * self._on_gpu.block_tokens)

    def check(self) -> None:
        """Raises AssertionError unless each row is free or has one hash."""
        rows = [*self._free, *self._row_of.values()]
        assert sorted(rows) == list(range(len(self._rows))), "a row is lost, or in two places"
        assert len(self._row_of) <= self.blocks
