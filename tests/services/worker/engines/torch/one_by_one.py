"""A stand-in for flash attention in tests without a GPU: one packed sequence after the other."""

from itertools import pairwise

import torch


def one_by_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    row_begins: torch.Tensor,
    begins: torch.Tensor,
    most_rows: int,
    most: int,
    scale: float | None,
) -> torch.Tensor:
    """A row sees all positions of its sequence but those of the rows behind it."""
    assert int(row_begins.diff().max()) == most_rows
    assert int(begins.diff().max()) == most
    assert row_begins.dtype == begins.dtype == torch.int32
    group, size = query.shape[1] // keys.shape[1], query.shape[2]
    out = []
    ends = zip(pairwise(row_begins.tolist()), pairwise(begins.tolist()), strict=True)
    for (row, last_row), (begin, end) in ends:
        k, v = (of[begin:end].repeat_interleave(group, 1) for of in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", query[row:last_row], k)
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(
            end - begin - last_row + row + 1
        )
        scores = (scores * (size**-0.5 if scale is None else scale)).masked_fill(later, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)
