"""KV that leaves and comes, by the names of blocks. It is copied between iterations, in vLLM's own
blocks: what comes fills free ones, which vLLM's prefix cache then knows as if it had computed them.

vLLM names a block by a hash with a secret of its process, and in other ways in each version. Here
blocks have the names that other replicas give them, too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.request import Request

from services.worker.engine import KvFacts, KvName, Lacking
from services.worker.engines.torch.prefixes import Prefix
from services.worker.engines.vllm.block_rows import read, shapes, write
from services.worker.engines.vllm.kept import KeptInVllm
from services.worker.engines.vllm.layout import layout_of

GROUP = 0  # models with several kinds of KV are refused


def namer(block_tokens: int) -> Callable[[Request], list[bytes]]:
    """Takes the place of vLLM's block hasher: the names of the full blocks that have none yet."""

    def names(request: Request) -> list[bytes]:
        named = request.block_hashes
        first = len(named) * block_tokens
        if request.num_tokens < first + block_tokens:
            return []
        # each name goes on from the one before, the first from the salt
        before = named[-1] if named else bytes.fromhex(request.cache_salt or "")
        new = request.all_token_ids[first:]
        return Prefix(block_tokens, before).hashes(new, len(new))

    return names


class Moving:
    """The blocks of one engine core, which has computed nothing yet. `facts` is None if it keeps no
    prefixes: then no block has a name.
    """

    def __init__(
        self, core: Any, kept: KeptInVllm, block_tokens: int, adapters: Mapping[str, str]
    ) -> None:
        self._core, self._kept, self._block_tokens = core, kept, block_tokens
        self._pool = core.scheduler.kv_cache_manager.block_pool
        parts = core.model_executor.collective_rpc(shapes)
        widths = [sum(layer.width for layer in part) for part in parts]
        self._ends = np.cumsum(widths)[:-1]  # of each process's part of a row
        self.facts: KvFacts | None = None
        if core.request_block_hasher is not None:
            core.request_block_hasher = namer(block_tokens)
            layout = layout_of(core.vllm_config, parts, adapters)
            self.facts = KvFacts(block_tokens, sum(widths), layout)

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        names = Prefix(self._block_tokens, salt).names(tokens[: len(tokens) - 1])
        blocks = [self._block(name.digest) for name in names]
        here = [block for block in blocks if block is not None]
        self._pool.touch(here)
        room = self._pool.get_num_free_blocks()
        self._pool.free_blocks(reversed(here))  # idle ones are the newest now
        found = next((n for n, block in enumerate(blocks) if block is None), len(blocks))
        away = [name for name, block in zip(names, blocks, strict=True) if block is None]
        return Lacking(found * self._block_tokens, away[:room])

    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        blocks = [self._block(digest) for digest in digests]
        here = [
            (block.block_id, place)
            for block, place in zip(blocks, into, strict=True)
            if block is not None
        ]
        if here:
            numbers = [number for number, _ in here]
            parts = self._core.model_executor.collective_rpc(read, args=(numbers,))
            rows = np.concatenate(parts, axis=1)
            for row, (_, place) in zip(rows, here, strict=True):
                np.frombuffer(place, dtype=np.uint8)[:] = row
        return [block is not None for block in blocks]

    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        new = {
            name.digest: (name, payload)
            for name, payload in zip(names, payloads, strict=True)
            if self._block(name.digest) is None
        }
        chosen = list(new.values())[: self._pool.get_num_free_blocks()]
        if chosen:
            self._fill(*zip(*chosen, strict=True))
        return [self._block(name.digest) is not None for name in names]

    def _fill(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> None:
        blocks = self._pool.get_new_blocks(len(names))
        rows = np.stack([np.frombuffer(payload, dtype=np.uint8) for payload in payloads])
        parts = np.split(rows, self._ends, axis=1)
        numbers = [block.block_id for block in blocks]
        self._core.model_executor.collective_rpc(write, args=(numbers, parts))
        for name, block in zip(names, blocks, strict=True):
            self._pool._insert_block_hash(
                make_block_hash_with_group_id(name.digest, GROUP), block, self._block_tokens
            )
        self._kept.came(names)
        self._pool.free_blocks(reversed(blocks))

    def _block(self, digest: bytes) -> Any:
        found = self._pool.get_cached_block(digest, [GROUP])
        return None if found is None else found[0]
