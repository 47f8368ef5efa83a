"""The torch engine's KV: blocks of positions, and who holds each. Any block may go to any sequence.
A new sequence begins where it can grow without a break, so that its keys mostly lie in one stretch,
which kernels read in place. Sequences that begin alike share these blocks.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine import KvName
from services.worker.engines.torch.host import PIECE, HostKv
from shared.core.prefixes.idle import Idle
from shared.prefix import Changes, Where

_FIRST_BLOCKS = 8  # for which a place has room before it moves to a larger array


class Place:
    """A sequence's pool positions: `stretches` [first, end) of whole blocks, `positions` each."""

    def __init__(self, block_tokens: int, wanted_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.wanted_blocks = -(-wanted_tokens // block_tokens)  # an estimate; only a hint
        self.blocks: list[int] = []
        self.stretches: list[tuple[int, int]] = []
        self._positions = np.empty(_FIRST_BLOCKS * block_tokens, dtype=np.int64)

    def positions(self, first: int, end: int) -> NDArray[np.int64]:
        """Pool positions of the sequence's positions first..end-1."""
        return self._positions[first:end]

    def within(self, first: int, end: int) -> list[tuple[int, int]]:
        """The stretches that hold the sequence's positions first..end-1."""
        found, before = [], 0
        for begin, stop in self.stretches:
            here, to = max(first - before, 0), min(end - before, stop - begin)
            if here < to:
                found.append((begin + here, begin + to))
            before += stop - begin
        return found

    def add(self, block: int) -> None:
        size, held = self.block_tokens, len(self.blocks) * self.block_tokens
        if held == len(self._positions):
            self._positions = np.concatenate([self._positions, np.empty_like(self._positions)])
        first = block * size
        self._positions[held : held + size] = np.arange(first, first + size)
        if self.stretches and self.stretches[-1][1] == first:
            self.stretches[-1] = (self.stretches[-1][0], first + size)
        else:
            self.stretches.append((first, first + size))
        self.blocks.append(block)

    def remove_last(self) -> int:
        """Takes the last block away, and returns it."""
        begin, end = self.stretches.pop()
        if end - begin > self.block_tokens:
            self.stretches.append((begin, end - self.block_tokens))
        return self.blocks.pop()


class Blocks:
    """The blocks of the pool, 0..total-1, and their owners. A block whose tokens are known by a
    hash (prefixes.py) outlives its owners: it is idle, counts as free, and may be shared. Idle ones
    are taken in the order that Idle has; what one holds goes to the host's memory, if there is one.
    A shared block is full, so nobody writes to it again.
    """

    def __init__(self, total: int, block_tokens: int, host: HostKv | None = None) -> None:
        # block n at n + 1, between two that no sequence gets; idle ones are taken
        self._taken = np.zeros(total + 2, dtype=np.int8)
        self._taken[[0, -1]] = 1
        self._unused = total
        self._block_tokens = block_tokens
        self._owners = np.zeros(total, dtype=np.int64)
        self.shared = 0  # the sum of all owners beyond the first of each block
        self._hash_of: dict[int, bytes] = {}
        self._known: dict[bytes, int] = {}
        self._idle = Idle()
        self._host = host
        self._marks: dict[bytes, int] = {}  # the hash of a prefix that ends with a known block
        self.changes = Changes()  # of these

    @property
    def free(self) -> int:
        return self._unused + len(self._idle)

    def grow(self, place: Place, tokens: int) -> bool:
        """Extends `place` to `tokens` positions; false: too few blocks are free, none is taken."""
        missing = -(-tokens // self._block_tokens) - len(place.blocks)
        if missing <= 0:
            return True
        if missing > self.free:
            return False
        self._make_room(missing)
        for _ in range(missing):
            place.add(self._next(place))
        return True

    def _make_room(self, blocks: int) -> None:
        while self._unused < blocks:
            self._forget(self._idle.pop())

    def _next(self, place: Place) -> int:
        """An unused block, which the sequence gets; behind its last one if that is unused."""
        block = place.blocks[-1] + 1 if place.blocks else self._begin(place.wanted_blocks)
        if self._taken[block + 1]:
            block = self._begin(place.wanted_blocks - len(place.blocks))
        self._taken[block + 1] = 1
        self._owners[block] = 1
        self._unused -= 1
        return block

    def shrink(self, place: Place, tokens: int) -> None:
        """Takes away the blocks of `place` that `tokens` positions do not need."""
        for _ in range(len(place.blocks) - -(-tokens // self._block_tokens)):
            self._leave(place.remove_last())

    def release(self, place: Place, now_s: float = 0.0, keep_s: float = 0.0) -> None:
        """Takes the blocks of `place` away. The end of the sequence becomes idle first."""
        for block in reversed(place.blocks):
            self._leave(block, now_s, keep_s)

    # ------------------------------------------------------------ shared blocks

    def find(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Those of these hashes that are known, from the first on until one is not."""
        host = self._host or ()
        for found, each in enumerate(hashes):
            if each not in self._known and each not in host:
                return hashes[:found]
        return hashes

    def claims(self, found: Sequence[bytes]) -> int:
        """The free blocks that these take if they are shared: idle ones, and those for what comes
        back from the host's memory.
        """
        return sum(each not in self._known or self._known[each] in self._idle for each in found)

    def share(self, place: Place, found: Sequence[bytes]) -> None:
        """`place`, which has no blocks, begins with these, which `find` found."""
        for each in found:
            block = self._known.get(each)
            if block is not None:
                self._idle.discard(block)
                self._owners[block] += 1
                self.shared += bool(self._owners[block] > 1)
        for first in range(0, len(found), PIECE):
            self._append(place, found[first : first + PIECE])

    def _append(self, place: Place, found: Sequence[bytes]) -> None:
        """`place` goes on with these; those of the host come to the GPU."""
        away = [each for each in found if each not in self._known]
        rows = self._host.take(away) if self._host is not None else []
        self._make_room(len(away))
        for each in found:
            block = self._known.get(each)
            if block is None:
                block = self._next(place)
                self._keep(each, block)
            place.add(block)
        if self._host is not None and away:
            self._host.load(rows, [self._known[each] for each in away])

    def lacking(self, names: Sequence[KvName], now_s: float) -> tuple[int, Sequence[KvName]]:
        """The number of a text's blocks that are known from the first on, and those of the rest
        that are not, as far as free blocks go beyond the known ones. These become the newest.
        """
        known = [each.digest for each in names if each.digest in self._known]
        for digest in reversed(known):
            self._idle.renew(self._known[digest], now_s)
        found, host = self.find([each.digest for each in names]), self._host or ()
        away = [
            each
            for each in names[len(found) :]
            if each.digest not in self._known and each.digest not in host
        ]
        room = self.free - self.claims(list({*known, *found}))
        return len(found), away[: max(0, room)]

    def places(self, digests: Sequence[bytes]) -> list[int | Tensor | None]:
        """The block of each, or what the host's memory keeps of it."""
        host = self._host
        return [
            self._known[each] if each in self._known else None if host is None else host.row(each)
            for each in digests
        ]

    def bring_in(
        self,
        names: Sequence[KvName],
        now_s: float,
        write: Callable[[Sequence[int], Sequence[int]], None],
    ) -> list[bool]:
        """Makes these known and idle, where free blocks go that far; true: it is known now.
        `write(blocks, numbers)` gives each block what the name of that number stands for.
        """
        host = self._host or ()
        new: list[int] = []
        there = [each.digest in self._known or each.digest in host for each in names]
        digests = set[bytes]()
        for n, each in enumerate(names):
            if not there[n] and each.digest not in digests and len(new) < self.free:
                digests.add(each.digest)
                new.append(n)
        place = Place(self._block_tokens, len(new) * self._block_tokens)
        self.grow(place, len(new) * self._block_tokens)
        if self._host is not None:
            self._host.flush()
        if new:
            write(place.blocks, new)
        for number, n in enumerate(new):
            self.name(place, number, names[n])
        self.release(place, now_s)
        return [was or each.digest in digests for was, each in zip(there, names, strict=True)]

    def name(self, place: Place, number: int, name: KvName) -> None:
        """Block `number` is full; tokens to its end have this hash, which keeps its first block."""
        block, (digest, mark) = place.blocks[number], name
        if digest not in self._known and block not in self._hash_of:
            if self._host is not None and digest in self._host:
                self._host.drop(digest)  # there was no room to bring it back
            if mark is not None:
                self._marks[digest] = mark
            self._keep(digest, block)

    def _keep(self, digest: bytes, block: int) -> None:
        self._known[digest] = block
        self._hash_of[block] = digest
        self._note(digest, Where.GPU)

    def forget(self) -> None:
        """Nothing is known any more, as nobody owns a block, and nothing is told of it."""
        for known in (self._known, self._hash_of, self._marks, self._idle):
            known.clear()
        if self._host is not None:
            self._host.forget()
        self._taken[1:-1] = 0
        self._unused = len(self._owners)
        self.changes.take()

    def _note(self, digest: bytes, where: Where) -> None:
        if digest in self._marks:
            self.changes.note(self._marks[digest], where)

    def check(self, places: Iterable[Place]) -> None:
        """Raises AssertionError unless these places own all that is owned."""
        owners = np.zeros_like(self._owners)
        for place in places:
            np.add.at(owners, np.array(place.blocks, dtype=np.int64), 1)
        assert (owners == self._owners).all(), "a block has lost its owner"
        assert self.shared == int(np.maximum(owners - 1, 0).sum())
        taken = self._taken[1:-1].astype(bool)
        assert self._unused == np.count_nonzero(~taken)
        idle = np.flatnonzero(taken & (self._owners == 0))
        assert set(idle.tolist()) == set(self._idle), "a block without an owner is not idle"
        assert self._known == {digest: block for block, digest in self._hash_of.items()}
        assert set(self._idle) <= set(self._hash_of)
        if self._host is not None:
            self._host.check()
            assert not any(digest in self._host for digest in self._known), "in two places"

    def _leave(self, block: int, now_s: float = 0.0, keep_s: float = 0.0) -> None:
        self._owners[block] -= 1
        if self._owners[block]:
            self.shared -= 1
            return
        if block in self._hash_of:
            self._idle.add(block, now_s, keep_s)
        else:
            self._taken[block + 1] = 0
            self._unused += 1

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        gone: bytes | None = digest
        del self._known[digest]
        if self._host is not None:
            gone = self._host.put(digest, block)
            self._note(digest, Where.HOST)
        if gone is not None:
            self._note(gone, Where.NOWHERE)
            self._marks.pop(gone, None)
        self._taken[block + 1] = 0
        self._unused += 1

    def _begin(self, wanted: int) -> int:
        """The first block of a sequence: in the middle of the longest unused stretch, since the
        owner of the block before may grow; earlier if `wanted` blocks need the room.
        """
        edges = np.diff(self._taken)
        begins, ends = np.flatnonzero(edges == -1), np.flatnonzero(edges == 1)
        longest = int(np.argmax(ends - begins))
        begin, length = int(begins[longest]), int(ends[longest] - begins[longest])
        return begin if begin == 0 else begin + max(min(length // 2, length - wanted), 0)


class Pool:
    """Keys and values by layer, [positions, KV heads, head size], made with the first write."""

    def __init__(self, positions: int) -> None:
        self._positions = positions
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def used(self) -> bool:
        return bool(self._layers)

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and the values of each layer."""
        return [pool for pools in self._layers.values() for pool in pools]

    @property
    def even(self) -> bool:
        """True if keys and values have one size in every layer."""
        return all(keys.shape == values.shape for keys, values in self._layers.values())

    def write(self, layer: int, at: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes [T, heads, size] to the positions `at` of the layer's pools, and returns them."""
        pools = self._layers.get(layer)
        if pools is None:
            pools = self._layers[layer] = (self._empty(key), self._empty(value))
        pools[0].index_copy_(0, at, key)
        pools[1].index_copy_(0, at, value)
        return pools

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the positions `sources` of every layer to `targets`; the two may overlap."""
        for pools in self._layers.values():
            for pool in pools:
                pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros((self._positions, *like.shape[1:]))
