"""Verifies drafts: each entry gets the tokens that the target draws, through the first that was not
drafted. Position n draws from (seed, n), drafts or not, so the output is the same. Requests that
always take the likeliest token have all nodes of a tree examined at once; others go node by node.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from services.worker.engine import Likely
from services.worker.engines.torch.adjusting import Written, adjusted
from services.worker.engines.torch.running import Running
from services.worker.engines.torch.sampling import Draw, choose, likeliest, likelihoods
from services.worker.engines.torch.token_tree import Tree


class Said(NamedTuple):
    """An entry's new tokens. `path`: the nodes of its tree whose logits gave the tokens."""

    path: list[int]
    tokens: list[int]
    logprobs: list[Likely]


def verify(
    logits: torch.Tensor, states: Sequence[Running], trees: dict[int, Tree], root: dict[int, int]
) -> dict[int, Said]:
    """The tokens of each entry that emits; it stops at the first token that was not drafted.
    `root`: the row of `logits` behind its newest token, which the rows of its tree follow.
    """
    said = {n: Said([0], [], []) for n in root}
    greedy = [
        n
        for n in root
        if (of := states[n]).likeliest and len(of.tokens) - of.prompt >= of.sampling.min_tokens
    ]
    tokens = likeliest(logits) if greedy else []
    for n in greedy:
        while _say(said[n], states[n], trees.get(n), tokens[root[n] + said[n].path[-1]]):
            pass
    if len(greedy) < len(root):
        chosen_alone = set(greedy)
        _step(logits, states, trees, root, said, [n for n in root if n not in chosen_alone])
    return said


def _step(
    logits: torch.Tensor,
    states: Sequence[Running],
    trees: dict[int, Tree],
    root: dict[int, int],
    said: dict[int, Said],
    going: list[int],
) -> None:
    """All of `going` take a step together, from node to node. The tokens join the text as they
    come, since the next one depends on them (penalties, a format).
    """
    while going:
        at = [root[n] + said[n].path[-1] for n in going]
        chosen = _choose(
            logits if at == list(range(len(logits))) else logits[at], [states[n] for n in going]
        )
        further = []
        for n, (token, likely) in zip(going, chosen, strict=True):
            said[n].logprobs.extend(likely)
            if _say(said[n], states[n], trees.get(n), token):
                further.append(n)
        going = further


def _say(said: Said, state: Running, tree: Tree | None, token: int) -> bool:
    """The token joins the text. True if it was drafted and the text goes on."""
    state.tokens.append(token)
    said.tokens.append(token)
    node = None if tree is None else tree.child(said.path[-1], token)
    if node is None or token in state.ends:
        return False
    said.path.append(node)
    return True


def _choose(
    logits: torch.Tensor, states: Sequence[Running]
) -> list[tuple[int, tuple[Likely, ...]]]:
    """Each request's next token, with its likelihood if asked. Position n draws from (seed, n)."""
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
