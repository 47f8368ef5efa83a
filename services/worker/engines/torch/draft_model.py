"""A draft model beside the torch engine's target: it proposes trees by beam search, with KV of its
own. Drafts depend only on the text, never on a random number. So to draw the target's own token,
and accept the draft that equals it, is rejection sampling (docs/decisions.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engines.torch import paged
from services.worker.engines.torch.attention.attention import Node, Part, Piece
from services.worker.engines.torch.paged_model import PagedModel
from services.worker.engines.torch.prefixes import Prefix
from services.worker.engines.torch.token_tree import Drafted
from shared.columns import Indices
from shared.policy.seam import Floats
from shared.policy.speculation import Candidates
from shared.vocabulary import Slot

# Of the target's blocks, for the nodes of trees: they go when the pass that verifies has ended.
NODES = 0.25
LEAST_BLOCKS = 64  # for nodes


class Ask(NamedTuple):
    """A request to draft for: `tokens` are its prompt and output."""

    slot: Slot
    tokens: Sequence[int]
    depth: int
    width: int
    temperature: float  # of the shares that the path probabilities are made of; 0 counts as 1
    salt: bytes = b""


class Accepted(NamedTuple):
    """Nodes of a slot's last tree that are text now: level and beam. `tokens`: the whole text."""

    slot: Slot
    tokens: Sequence[int]
    nodes: Sequence[tuple[int, int]]


@dataclass(slots=True)
class _Held:
    place: paged.Place
    prefix: Prefix
    filled: int = 0  # positions computed
    depth: int = 0  # of its last tree; level l of beam b lies behind `filled`, at b (depth - 1) + l


def roomy_blocks(kv_blocks: int) -> int:
    """The blocks for all text that a target with `kv_blocks` can hold, and for nodes of trees."""
    return kv_blocks + max(LEAST_BLOCKS, int(NODES * kv_blocks))


class DraftModel:
    """The model and its KV. Raises ConfigError as PagedModel does."""

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        *,
        kv_blocks: int,
        block_tokens: int,
        vocabulary: int,
        prefix_caching: bool,
    ) -> None:
        """`vocabulary`: of the target."""
        self.kv_blocks = kv_blocks
        self._block_tokens = block_tokens
        self._prefix_caching = prefix_caching
        self._model = PagedModel(folder, device, dtype, lambda: kv_blocks * block_tokens)
        # the longest text, with its drafts, that the model reads
        self.context_tokens = self._model.context_tokens
        self._vocabulary = min(vocabulary, self._model.vocabulary)
        self._smaller = self._model.vocabulary < vocabulary
        self._blocks = paged.Blocks(self.kv_blocks, block_tokens)
        self._held: dict[Slot, _Held] = {}

    @property
    def free_blocks(self) -> int:
        return self._blocks.free

    @property
    def shared_blocks(self) -> int:
        """The blocks saved because slots share them: as in EngineState."""
        return self._blocks.shared

    @property
    def recorded(self) -> int:
        return self._model.recorded

    def draft(self, asks: Sequence[Ask]) -> Drafted:
        """Beam search: at each level the `width` likeliest extensions. What is unread is read
        first. Without KV, or room in its context, a request gets fewer levels or none.
        """
        depth = [self._prepare(ask) for ask in asks]
        levels = max(depth)
        widest = max((ask.width for ask, own in zip(asks, depth, strict=True) if own), default=1)
        shape = levels, len(asks), widest
        found = Drafted(
            Candidates(np.array(depth, np.int32), np.zeros(shape, np.bool_), np.zeros(shape)),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
        )
        for n, (ask, own) in enumerate(zip(asks, depth, strict=True)):
            found.candidates.there[:own, n, : ask.width] = True
        # of requests with several beams, the pool positions on the way to each: [beams, positions]
        seen: dict[int, NDArray[np.int64]] = {}
        for level in range(levels):
            going = [n for n, own in enumerate(depth) if own > level]
            if level == 0:
                logits = self._read([asks[n] for n in going])
            else:
                logits = self._step(asks, going, found, level, seen)
            self._extend(logits, asks, going, found, level)
        return found

    def keep(self, accepted: Sequence[Accepted]) -> None:
        """The verification has ended: the KV of the nodes that were not accepted is free."""
        sources: list[int] = []
        targets: list[int] = []
        for slot, _, nodes in accepted:
            held = self._held[slot]
            levels = held.depth - 1  # of which the draft has computed the KV
            nodes = nodes[:levels]
            for level, beam in nodes:
                if beam:
                    first = held.filled + beam * levels + level
                    sources += held.place.positions(first, first + 1).tolist()
                    first = held.filled + level
                    targets += held.place.positions(first, first + 1).tolist()
            held.filled += len(nodes)
        self._model.move(sources, targets)
        for slot, tokens, _ in accepted:
            held = self._held[slot]
            self._blocks.shrink(held.place, held.filled)
            if self._prefix_caching:
                # the newest token is read again where no tree was verified (`_prepare`)
                sure = min(held.filled, len(tokens) - 1)
                held.prefix.name(self._blocks, held.place, tokens, sure)

    def check(self) -> None:
        """Raises AssertionError unless every block has its owners."""
        self._blocks.check(held.place for held in self._held.values())

    def release(self, slot: Slot) -> None:
        """Frees the blocks that the slot has here, if any."""
        held = self._held.pop(slot, None)
        if held is not None:
            self._blocks.release(held.place)

    def _prepare(self, ask: Ask) -> int:
        """The levels that the request can have. Its place has room for them."""
        known = len(ask.tokens)
        held = self._held.get(ask.slot)
        if held is None:
            place = paged.Place(self._block_tokens, known + ask.depth)
            held = self._held[ask.slot] = _Held(place, Prefix(self._block_tokens, ask.salt))
            if self._prefix_caching:
                held.filled = held.prefix.begin(self._blocks, place, ask.tokens, self._blocks.free)
        # the newest token is read again where its last tree was not verified
        held.filled = min(held.filled, known - 1)
        depth = min(ask.depth, self.context_tokens - known)
        unknown = self._smaller and max(ask.tokens[held.filled :]) >= self._model.vocabulary
        if depth < 1 or unknown:
            return 0
        for levels in (depth, 1):
            if self._blocks.grow(held.place, known + (levels - 1) * ask.width):
                held.depth = levels
                return levels
        return 0

    def _read(self, asks: Sequence[Ask]) -> Tensor:
        """[requests, vocabulary] the logits behind the newest token of each."""
        ids: list[int] = []
        parts: list[Part] = []
        ends: list[int] = []
        for ask in asks:
            held, known = self._held[ask.slot], len(ask.tokens)
            ids += ask.tokens[held.filled :]
            parts.append(Piece(held.filled, known - held.filled, held.place))
            ends.append(len(ids) - 1)
            held.filled = known
        return self._model.logits(ids, parts, ends)

    def _step(
        self,
        asks: Sequence[Ask],
        going: Sequence[int],
        found: Drafted,
        level: int,
        seen: dict[int, NDArray[np.int64]],
    ) -> Tensor:
        """[beams of these requests, vocabulary] the logits behind the nodes of the level before."""
        ids: list[int] = []
        parts: list[Part] = []
        tokens, above = found.tokens[level - 1], found.above[level - 1]
        for n in going:
            width, held = asks[n].width, self._held[asks[n].slot]
            position, steps = held.filled + level - 1, held.depth - 1
            if width == 1:
                ids.append(int(tokens[n, 0]))
                parts.append(Piece(position, 1, held.place))
                continue
            own = held.place.positions(position, held.filled + width * steps)[::steps]
            before = seen[n] if level > 1 else held.place.positions(0, held.filled)[np.newaxis]
            seen[n] = np.concatenate((before[above[n, :width]], own[:, np.newaxis]), axis=1)
            ids += tokens[n, :width].tolist()
            parts += [Node(position, sees) for sees in seen[n]]
        return self._model.logits(ids, parts, range(len(ids)))

    def _extend(
        self, logits: Tensor, asks: Sequence[Ask], going: Sequence[int], found: Drafted, level: int
    ) -> None:
        """Writes a level of these requests into `found`, from the logits of the beams before it."""
        widest = found.tokens.shape[2]
        likely, ids = self._likeliest(logits, [asks[n] for n in going], level, widest)
        # to write and read eight rows by a slice takes 0.8 us, by a list 7.7
        here = slice(None) if len(going) == len(asks) else going
        path = found.candidates.path
        if level == 0 or widest == 1:
            path[level, here] = likely * path[level - 1, here] if level else likely
            found.tokens[level, here] = ids
            return
        before = found.candidates.there[level - 1, here]  # [requests, beams]
        shares = np.zeros((len(going), widest, widest))
        tokens = np.zeros((len(going), widest, widest), dtype=np.int32)
        shares[before], tokens[before] = likely, ids
        ahead = (path[level - 1, here][:, :, None] * shares).reshape(len(going), -1)
        order = np.argsort(-ahead, axis=1, kind="stable")[:, :widest]
        rows = np.arange(len(going))[:, np.newaxis]
        path[level, here] = ahead[rows, order]
        found.tokens[level, here] = tokens.reshape(len(going), -1)[rows, order]
        found.above[level, here] = order // widest

    def _likeliest(
        self, logits: Tensor, asks: Sequence[Ask], level: int, widest: int
    ) -> tuple[Floats, Indices]:
        """[beams, widest] the likeliest next tokens of each beam: probabilities and tokens."""
        logits = logits[:, : self._vocabulary]
        if any(ask.temperature not in (0.0, 1.0) for ask in asks):
            heat = [
                ask.temperature or 1.0 for ask in asks for _ in range(ask.width if level else 1)
            ]
            logits = logits / torch.tensor(heat, device=logits.device)[:, None]
        shares = logits.softmax(dim=-1, dtype=torch.float32)
        if shares.is_cpu:
            return _largest(shares.numpy(), widest)
        likely, ids = shares.topk(widest, dim=-1)
        return likely.cpu().numpy(), ids.cpu().numpy()


def _largest(shares: Floats, count: int) -> tuple[Floats, Indices]:
    """[rows, count] the largest of each row, and where they are; `shares` is overwritten."""
    rows = np.arange(len(shares))
    likely = np.empty((len(shares), count))
    ids = np.empty((len(shares), count), dtype=np.intp)
    for n in range(count):
        if n:
            shares[rows, ids[:, n - 1]] = -1.0
        ids[:, n] = at = shares.argmax(axis=1)
        likely[:, n] = shares[rows, at]
    return likely, ids
