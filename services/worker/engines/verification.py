"""The tokens of a batch: those that the target draws, one by one, and for as long as they were
drafted.

Position n of a request draws from (seed, n), with drafts and without. So the output is the same.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.worker.engine import Likely
from services.worker.engines.adjusting import Written, adjusted
from services.worker.engines.running import Running
from services.worker.engines.sampling import Draw, choose, likelihoods
from services.worker.engines.token_tree import Tree


class Said(NamedTuple):
    """An entry's new tokens. `path`: the nodes of its tree whose logits gave the tokens."""

    path: list[int]
    tokens: list[int]
    logprobs: list[Likely]


def verify(
    logits: torch.Tensor,
    states: Sequence[Running],
    trees: dict[int, Tree],
    root: dict[int, int],
) -> dict[int, Said]:
    """The tokens of each entry that emits. All take a step together, from node to node, and an
    entry stops at the first token that was not drafted. The tokens join the text as they come,
    so that what the next one depends on (penalties, a format) is there.
    """
    said = {n: Said([0], [], []) for n in root}
    going = list(root)
    while going:
        at = [root[n] + said[n].path[-1] for n in going]
        chosen = _choose(
            logits if at == list(range(len(logits))) else logits[at], [states[n] for n in going]
        )
        further = []
        for n, (token, likely) in zip(going, chosen, strict=True):
            states[n].tokens.append(token)
            said[n].tokens.append(token)
            said[n].logprobs.extend(likely)
            tree = trees.get(n)
            node = None if tree is None else tree.child(said[n].path[-1], token)
            if node is not None and token not in states[n].ends:
                said[n].path.append(node)
                further.append(n)
        going = further
    return said


def _choose(
    logits: torch.Tensor, states: Sequence[Running]
) -> list[tuple[int, tuple[Likely, ...]]]:
    """The next token of each request, and its likelihood where asked. Position n of a request
    draws from (seed, n), where n counts from its first token.
    """
    with torch.inference_mode():
        shown = adjusted(
            logits,
            [Written(state.sampling, state.prompt, state.tokens, state.ends) for state in states],
        )
        constraints = [(row, c) for row, s in enumerate(states) if (c := s.constraint)]
        if constraints and shown is logits:
            shown = logits.clone()
        for row, constraint in constraints:
            constraint.hold(shown[row])
        tokens = choose(
            shown, [Draw(state.sampling, state.seed, len(state.tokens)) for state in states]
        )
        for row, constraint in constraints:
            constraint.take(tokens[row : row + 1])
        likely: list[tuple[Likely, ...]] = [()] * len(states)
        rows = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
        if rows:
            tops = [states[row].sampling.logprobs or 0 for row in rows]
            found = likelihoods(logits[rows], [tokens[row] for row in rows], tops)
            for row, one in zip(rows, found, strict=True):
                likely[row] = (one,)
        return list(zip(tokens, likely, strict=True))
