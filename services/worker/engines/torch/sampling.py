"""Chooses tokens for a batch, greedily or by a draw at (seed, position), with log-probabilities. A
row depends only on itself and its parameters, so its token is the same in any batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.engine import Likely
from services.worker.engines import draws
from shared.schemas import Sampling

_COLDEST = 1e-5  # below it the division would overflow; as good as greedy
# The likeliest tokens that are sorted first for a top-p cut. They are seldom too few, and to sort a
# large vocabulary takes many times as long.
_SORTED_FIRST = (256, 4096)
_STRIDE = 512  # tokens whose shares are summed before the one among them is sought


class Draw(NamedTuple):
    """One token to choose: its parameters, and its place in the request's random numbers."""

    sampling: Sampling
    seed: int
    position: int


def choose(logits: Tensor, wanted: Sequence[Draw]) -> list[int]:
    """One token for each row of `logits` [B, vocabulary]; equal (logits, draw) give equal tokens.
    Temperature comes first, then min-p, top-k, and top-p over the rest. A token as likely as the
    last one kept is kept. The draw inverts the distribution cumulated in the vocabulary's order.
    """
    tokens = [0] * len(wanted)
    greedy = [
        row
        for row, draw in enumerate(wanted)
        if draw.sampling.temperature <= 0 or draw.sampling.top_k == 1
    ]
    drawn = sorted(set(range(len(wanted))).difference(greedy))
    for rows in (greedy, drawn):
        if rows:
            some = logits if len(rows) == len(wanted) else logits[rows]
            chosen = (
                likeliest(some) if rows is greedy else _drawn(some, [wanted[row] for row in rows])
            )
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
    return tokens


def likeliest(logits: Tensor) -> list[int]:
    """The likeliest token of each row of `logits` [B, vocabulary]; the first of equals."""
    if logits.is_cpu:  # 8 rows of 2,048 tokens take 2 us, by torch 17
        found: list[int] = logits.float().numpy().argmax(axis=-1).tolist()
        return found
    return logits.argmax(dim=-1).tolist()


def likelihoods(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Likely]:
    """Natural log-probabilities of each row's token, and of its `tops` likeliest, best first."""
    known = logits.float().log_softmax(dim=-1)
    own = known.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    best, which = known.topk(min(max(tops), known.shape[1]), dim=-1)
    pairs = [
        list(zip(ids, values, strict=True))
        for ids, values in zip(which.tolist(), best.tolist(), strict=True)
    ]
    return [
        Likely(value, tuple(pair[:top])) for value, pair, top in zip(own, pairs, tops, strict=True)
    ]


def _drawn(logits: Tensor, how: Sequence[Draw]) -> list[int]:
    def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)[:, None]

    scaled = logits.float() / column([max(draw.sampling.temperature, _COLDEST) for draw in how])
    shares = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()  # relative to the likeliest token
    vocabulary = shares.shape[1]
    rows = [row for row, draw in enumerate(how) if draw.sampling.min_p > 0]
    if rows:
        shares[rows] = _cut(shares[rows], column([how[row].sampling.min_p for row in rows]))
    some = [
        (row, draw.sampling.top_k)
        for row, draw in enumerate(how)
        if 0 < draw.sampling.top_k < vocabulary
    ]
    if some:
        rows = [row for row, _ in some]
        best = shares[rows].topk(max(k for _, k in some), dim=-1).values
        least = best.gather(
            1, torch.tensor([k - 1 for _, k in some], device=logits.device)[:, None]
        )
        shares[rows] = _cut(shares[rows], least)
    rows = [row for row, draw in enumerate(how) if draw.sampling.top_p < 1]
    if rows:
        shares[rows] = _cut(
            shares[rows], _least(shares[rows], column([how[row].sampling.top_p for row in rows]))
        )
    return _among(
        shares, column([draws.uniform(draw.seed, draw.position) for draw in how], torch.float64)
    )


def _cut(shares: Tensor, least: Tensor) -> Tensor:
    return shares.masked_fill_(shares < least, 0.0)


def _least(shares: Tensor, mass: Tensor) -> Tensor:
    """[B, 1] the largest share such that it and all larger ones sum to `mass` of the row."""
    wanted = shares.sum(dim=-1, keepdim=True) * mass
    least = torch.zeros_like(wanted)
    open_rows = torch.arange(len(shares), device=shares.device)
    for width in (*(width for width in _SORTED_FIRST if width < shares.shape[1]), shares.shape[1]):
        ordered = shares[open_rows].topk(width, dim=-1).values
        cumulated = ordered.cumsum(dim=-1)
        last = (cumulated < wanted[open_rows]).sum(dim=-1, keepdim=True)
        least[open_rows] = ordered.gather(1, last.clamp(max=width - 1))
        open_rows = open_rows[last[:, 0] == width]
        if not len(open_rows):
            break
    return least


def _among(shares: Tensor, points: Tensor) -> list[int]:
    """The token at each point. By sums of _STRIDE tokens: cumulating a large vocabulary is slow."""
    parts = torch.nn.functional.pad(shares, (0, -shares.shape[1] % _STRIDE)).view(
        len(shares), -1, _STRIDE
    )
    which, within = _invert(parts.sum(-1), points)
    part = parts.gather(1, which[:, :, None].expand(-1, -1, _STRIDE))[:, 0]
    return (which * _STRIDE + _invert(part, within)[0])[:, 0].tolist()


def _invert(shares: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The index in `shares` [B, N] that each of `points` falls on, and its place within that share.
    Points are parts of the sum; both are in [0, 1).
    """
    cumulated = shares.double().cumsum(dim=-1)
    target = points * cumulated[:, -1:]
    picks = torch.searchsorted(cumulated, target, right=True)
    # rounding may not pick a share of 0
    picks = picks.minimum((cumulated < cumulated[:, -1:]).sum(dim=-1, keepdim=True))
    share = shares.gather(1, picks).double()
    return picks, ((target - cumulated.gather(1, picks) + share) / share).clamp(0.0, 1.0)
