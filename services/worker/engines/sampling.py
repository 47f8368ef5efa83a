"""From logits to tokens: greedy, or drawn at (seed, position), a whole batch at once."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.engines import draws
from shared.schemas import Sampling

_COLDEST = 1e-5  # below it the division would overflow; as good as greedy


class Draw(NamedTuple):
    """One token to choose: how, and the place in the request's own stream of random numbers."""

    sampling: Sampling
    seed: int
    position: int


def choose(logits: Tensor, wanted: Sequence[Draw]) -> list[int]:
    """One token for each row of `logits` [B, vocabulary]; equal for equal (logits, draw), whoever else is in the batch.

    Temperature first, then top-k, then top-p over what is left (at least one token stays); the draw inverts the cumulated
    distribution, most likely token first.
    """
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    sampled = [row for row, draw in enumerate(wanted) if draw.sampling.temperature > 0]
    if not sampled:
        return tokens
    how = [wanted[row] for row in sampled]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device)[:, None]

    scaled = logits[sampled].float() / column([max(draw.sampling.temperature, _COLDEST) for draw in how])
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= column([draw.sampling.top_k or ordered.shape[1] for draw in how]), -torch.inf)
    shares = ordered.softmax(dim=-1)
    before = shares.cumsum(dim=-1) - shares  # of the likelier tokens
    shares = shares.masked_fill((before >= column([draw.sampling.top_p for draw in how])) & (ranks > 0), 0.0)
    cumulated = shares.double().cumsum(dim=-1)
    points = torch.tensor([draws.uniform(draw.seed, draw.position) for draw in how], dtype=torch.float64, device=logits.device)
    picks = torch.searchsorted(cumulated, points[:, None] * cumulated[:, -1:], right=True)
    picks = picks.clamp(max=(shares > 0).sum(dim=-1, keepdim=True) - 1)  # rounding may not pick a token of share 0
    chosen: list[int] = order.gather(1, picks)[:, 0].tolist()
    for row, token in zip(sampled, chosen, strict=True):
        tokens[row] = token
    return tokens
