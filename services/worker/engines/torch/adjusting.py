"""Adjusts logits before a token is chosen, in vLLM's order: bias, no early end, penalties."""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shared.schemas import Sampling


class Written(NamedTuple):
    """A request whose next token is to be chosen. `ends` are tokens that would end its output."""

    sampling: Sampling
    prompt: int  # number of prompt tokens
    tokens: Sequence[int]  # prompt and output
    ends: Collection[int]


def adjusted(logits: Tensor, rows: Sequence[Written]) -> Tensor:
    """The logits [B, vocabulary], untouched or a float32 copy. Rows do not depend on others."""
    asking = [row for row, written in enumerate(rows) if asks(written)]
    if not asking:
        return logits
    changed = logits.float().clone()
    for row in asking:
        _adjust(changed[row], rows[row])
    return changed


def asks(written: Written) -> bool:
    """True if the logits are to be adjusted. Once false, it stays false."""
    s = written.sampling
    return always_asks(s) or len(written.tokens) - written.prompt < s.min_tokens


def always_asks(s: Sampling) -> bool:
    """True if the logits of every token are adjusted, not only those of the first `min_tokens`."""
    penalised = (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) != (1.0, 0.0, 0.0)
    return penalised or bool(s.logit_bias)


def _adjust(logits: Tensor, written: Written) -> None:
    """Adjusts a row. Repetition counts the prompt, too (Keskar et al., CTRL, 2019, section 4.1)."""

    def at(tokens: Collection[int]) -> Tensor:
        return torch.tensor(
            [token for token in tokens if 0 <= token < len(logits)],
            dtype=torch.long,
            device=logits.device,
        )

    s, output = written.sampling, written.tokens[written.prompt :]
    for token, bias in s.logit_bias.items():
        if token < len(logits):
            logits[token] += bias
    if len(output) < s.min_tokens:
        logits[at(written.ends)] = -torch.inf
    if s.repetition_penalty != 1:
        seen = at(set(written.tokens))
        logits[seen] = torch.where(
            logits[seen] > 0,
            logits[seen] / s.repetition_penalty,
            logits[seen] * s.repetition_penalty,
        )
    if output and (s.presence_penalty or s.frequency_penalty):
        counts = Counter(output)
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        logits[at(counts)] -= s.presence_penalty + s.frequency_penalty * times
