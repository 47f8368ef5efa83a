"""Attention of a whole mixed batch, in place of transformers'. A pass carries one row of T packed
tokens; each layer writes KV to the pool, then each sequence attends over its own.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from services.worker.engines.torch.paged import Place
from shared.errors import ConfigError

NAME = "slackline_paged"  # the value of `attn_implementation`

# (layer, query, key, value, scale): [1, (KV) heads, T, size] each -> [1, T, heads, size]
Attend = Callable[[int, Tensor, Tensor, Tensor, float | None], Tensor]


class Piece(NamedTuple):
    """`new` tokens of one sequence, standing on `cached` ones; `place` has room for both."""

    cached: int
    new: int
    place: Place


class Node(NamedTuple):
    """One token of a tree: it stands at `position` of its sequence, and sees these positions of the
    pool: its sequence, the nodes above it, and last its own.
    """

    position: int
    sees: NDArray[np.int64]


class Branches(NamedTuple):
    """A tree of tokens behind `cached` positions. `sees`: the pool positions of the cached tokens,
    then of the tree's nodes. `paths`: of each node, the nodes from the root to it.
    """

    cached: int
    sees: NDArray[np.int64]
    paths: Sequence[tuple[int, ...]]

    def nodes(self) -> list[Node]:
        context, own = self.sees[: self.cached], self.sees[self.cached :]
        return [
            Node(self.cached + len(path) - 1, np.concatenate((context, own[list(path)])))
            for path in self.paths
        ]


Part = Piece | Node | Branches  # of a batch


def rows_of(part: Part) -> int:
    """The number of the part's new tokens."""
    match part:
        case Node():
            return 1
        case Branches(_, _, paths):
            return len(paths)
        case Piece(_, new, _):
            return new


def positions_of(parts: Sequence[Part]) -> tuple[list[int], list[int]]:
    """The positions of the parts' new tokens in their sequences, and in the pool."""
    in_sequence: list[int] = []
    in_pool: list[int] = []
    for part in parts:
        match part:
            case Piece(cached, new, place):
                in_sequence += range(cached, cached + new)
                in_pool += place.positions(cached, cached + new).tolist()
            case Node(position, sees):
                in_sequence.append(position)
                in_pool.append(int(sees[-1]))
            case Branches(cached, sees, paths):
                in_sequence += [cached + len(path) - 1 for path in paths]
                in_pool += sees[cached:].tolist()
    return in_sequence, in_pool


class Batch(Protocol):
    """The layout of one forward pass, the same for every layer."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor: ...


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    scaling: float | None = None,
    slackline_attend: Attend | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Raises ConfigError for a model whose attention is not plain causal attention."""
    unknown = [
        name
        for name in ("sliding_window", "softcap", "s_aux", "position_bias")
        if rest.get(name) is not None
    ]
    config: Any = module.config
    if unknown == ["sliding_window"] and rest["sliding_window"] >= config.max_position_embeddings:
        unknown = []  # a window of at least the whole context is allowed
    if unknown or slackline_attend is None:
        raise ConfigError(
            "this engine computes plain causal attention; the model wants "
            f"{unknown or 'another way of being called'}"
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return slackline_attend(layer, query, key, value, scaling), None


def _no_mask(*_: object, **__: object) -> None:
    """No mask: the batch's layout determines which positions a query sees."""


def register() -> None:
    """Makes NAME known to transformers. It may be called again."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)
