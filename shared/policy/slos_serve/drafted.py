"""Batches whose decodes speculate: SLOs-Serve's section 3.2.3 and appendix D.

A batch may take as long as the draft lengths of the tiers allow (draft_length.py has both, and
`Acc`, the tokens expected of a length). All standard decodes run in each batch and verify as many
tokens as their TPOT then asks for. A decode that has
fallen behind has a tighter TPOT until it has caught up. Such batches are planned one at a time,
since the number of tokens from a batch is known only when it is over.

Not in the paper: the draft model reads a context before it first drafts for it. Where it would have
to read many, some decodes draft only from a later batch on, and batches are no longer than the TPOT
of these decodes until then.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shared.columns import Ints
from shared.policy import chunk
from shared.policy.chunk import Decoding
from shared.policy.seam import Bools, Choice, Floats, Speculation, View
from shared.policy.slos_serve.batch import CLOSE_S, Standing, filled
from shared.policy.slos_serve.best_effort import make_room, queue_of
from shared.policy.slos_serve.draft_length import WINDOW_TOKENS, Acc, Lengths, token_s
from shared.policy.speculation import draft_rows_s, lacking

# Ours: the share of a batch's time in which the draft model may read.
READING = 0.1


class Drafting(NamedTuple):
    """The present speculation. `tightened_s`: each row's TPOT, tighter while the row is behind."""

    lengths: Lengths
    acc: Acc
    tightened_s: Floats


def speculating(view: View, standing: Standing, drafting: Drafting) -> Choice | None:
    """One batch in which all standard decodes verify as many tokens as their pace asks for; None
    where KV is too short for drafts.
    """
    assert view.draft is not None
    every = chunk.decoding(view)
    every = make_room(view, every, queue_of(view, every.victims, best_effort=False))
    rows = every.rows[view.standard[every.rows]]
    if not len(rows):
        return None
    least = min(drafting.lengths.tokens)
    left = view.max_tokens[rows] - view.generated_tokens[rows] - view.unsure_tokens[rows]
    tokens = np.maximum(
        _verified(drafting, standing.tpot_s[rows], drafting.tightened_s[rows]), least
    )
    tokens = np.minimum(tokens, np.maximum(left, 1)).astype(np.int32)
    wait = _read_later(
        lacking(view, rows).astype(np.float64) * token_s(view.draft.read_s),
        tokens > 1,
        READING * drafting.lengths.batch_s,
    )
    tokens[wait] = 1
    tightest_s = float(standing.tpot_s[rows[wait]].min(initial=np.inf))
    batch_s = min(drafting.lengths.batch_s, tightest_s)
    has = view.top_tokens[rows]
    extra = (has + tokens - 1) // view.block_tokens - has // view.block_tokens
    free_blocks = every.free_blocks - int(extra.sum())
    if free_blocks < len(rows) or tokens.max() == 1:
        return None
    depth: Ints = (tokens - 1).astype(np.int32)
    shape = chunk.decodes_of(view, rows).with_drafts(depth, has)
    drafted_s = draft_rows_s(view, rows, depth, np.ones_like(depth))
    running = Decoding(rows, every.victims, free_blocks, shape)
    choice = filled(view, every, running, standing, batch_s, drafted_s).choice
    count = len(choice.slots)
    caps = choice.caps.copy()
    caps[: len(rows)] = tokens
    padded = np.zeros(count, dtype=np.int32)
    padded[: len(rows)] = depth
    speculation = Speculation(
        method="chain",
        depth=padded,
        width=np.ones(count, dtype=np.int32),
        budget_tokens=int(tokens.sum()),
    )
    return replace(choice, caps=caps, speculation=speculation, repeats=1)


def _read_later(reading_s: Floats, drafts: Bools, most_s: float) -> Bools:
    """[rows] the decodes that would draft but wait. The shortest contexts are read first: one of
    them, or as many as take `most_s`.
    """
    order = drafts.nonzero()[0]
    order = order[np.argsort(reading_s[order], kind="stable")]
    late = reading_s[order].cumsum() > most_s
    late[:1] = False
    wait = np.zeros(len(reading_s), dtype=np.bool_)
    wait[order[late]] = True
    return wait


def _verified(drafting: Drafting, tpot_s: Floats, tightened_s: Floats) -> Ints:
    """Appendix D: for each row the shortest length that does not bind. By its tightened TPOT, the
    mean counts.
    """
    until_s, acc = drafting.lengths.batch_s - CLOSE_S, drafting.acc
    enough = (tpot_s[:, None] * acc.made[1:] >= until_s) & (
        tightened_s[:, None] * acc.mean[1:] >= until_s
    )
    tokens: Ints = np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, acc.longest).astype(
        np.int32
    )
    return tokens


def tightened(view: View, tpot_s: Floats, mean: Floats) -> Floats:
    """[rows] section 3.2.3: a decode that has fallen behind its TPOT since its first token gets a
    tighter one, with which it catches up within WINDOW_TOKENS. A decode behind by more than half of
    that many TPOTs is past rescue and keeps its own.
    """
    generated = (
        view.generated_tokens + mean[np.minimum(view.unsure_tokens + 1, len(mean) - 1)] - 1.0
    )
    with np.errstate(invalid="ignore"):
        behind_s = view.start_unix_s - (view.first_token_unix_s + (generated - 1.0) * tpot_s)
    late = (behind_s > 0) & (behind_s <= WINDOW_TOKENS / 2 * tpot_s)
    tightened: Floats = np.where(
        late, tpot_s - np.where(late, behind_s, 0.0) / WINDOW_TOKENS, tpot_s
    )
    return tightened
