"""The KV of blocks as rows of bytes: the layers one after the other. Each vLLM process that has a
part of the model calls these functions.

Every attention of the supported versions shows a layer's KV as [blocks, heads, tokens, content], in
whatever order it lies in memory; a block of the pool may be several of its own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class Shape(NamedTuple):
    """A layer's part of a block; `width` in bytes."""

    dtype: str
    shape: tuple[int, ...]
    width: int


def shapes(worker: Any) -> list[Shape]:
    return [
        Shape(str(layer.dtype), tuple(layer.shape[1:]), layer[0].numel() * layer.element_size())
        for layer in _layers(worker)
    ]


@torch.inference_mode()
def read(worker: Any, blocks: Sequence[int]) -> NDArray[np.uint8]:
    """[blocks, bytes]."""
    layers = _layers(worker)
    at = torch.tensor(blocks, device=layers[0].device)
    parts = [layer[at].reshape(len(blocks), -1).view(torch.uint8) for layer in layers]
    return torch.cat(parts, dim=1).cpu().numpy()


@torch.inference_mode()
def write(worker: Any, blocks: Sequence[int], parts: Sequence[NDArray[np.uint8]]) -> None:
    """`parts`: the rows of each process."""
    layers = _layers(worker)
    device = layers[0].device
    at = torch.tensor(blocks, device=device)
    rest = torch.from_numpy(parts[worker.rank]).to(device)
    for layer in layers:
        width = layer[0].numel() * layer.element_size()
        part, rest = rest[:, :width].contiguous(), rest[:, width:]
        layer[at] = part.view(layer.dtype).reshape(len(blocks), *layer.shape[1:])


def _layers(worker: Any) -> list[torch.Tensor]:
    runner = worker.model_runner
    n = runner.kv_cache_config.num_blocks
    return [layer.unflatten(0, (n, len(layer) // n)) for layer in runner.kv_caches]
