"""Batches of prefills without any decode (`sit_out`): decodes that are early sit out a short batch.
Beyond the paper.

Algorithm 2 makes every decode due at each plan and batches as long as the tightest TPOT, so a
prompt waits for all decodes of that TPOT, also where its first token is due before such a batch
ends. Here the prompts that are due first run alone, if beside the decodes they would be late, alone
they are in time, and one batch of the decodes still ends before any of them has waited longer than
its TPOT for a token. With no gap above the TPOT, windows of any length hold.
"""

import numpy as np

from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.prefills_alone import whole_prefills
from shared.policy.seam import Choice, Floats, View
from shared.policy.slos_serve.batch import CLOSE_S, MARGIN_S, Standing, by_deadline
from shared.policy.slos_serve.draft_length import BATCH_TOKENS

# The most prompts that are tried.
PROMPTS = 12


def sat_out_due_s(view: View, tpot_s: Floats) -> float:
    """Seconds until the first token is due of the standard decodes that sat out the last batch, a
    TPOT after the one before; inf where none did, or where no batch is so short.
    """
    rows = _decodes(view)
    due_s = view.newest_token_unix_s[rows] + tpot_s[rows] - view.start_unix_s
    sat_out = view.newest_token_unix_s[rows] < view.start_unix_s - CLOSE_S
    soon = sat_out & (due_s >= view.profile.batch_s(chunk.decodes_of(view, rows)))
    return float(due_s[soon].min(initial=np.inf))


def spare_s(view: View, tpot_s: Floats) -> float:
    """Seconds for which all standard decodes can wait. `tpot_s` runs along the rows."""
    rows = _decodes(view)
    if not len(rows):
        return 0.0
    due_s = float((view.newest_token_unix_s[rows] + tpot_s[rows]).min()) - view.start_unix_s
    return due_s - view.profile.batch_s(chunk.decodes_of(view, rows)) - MARGIN_S


def tokens_alone(view: View, tpot_s: Floats, due_s: Floats) -> Floats:
    """[deadlines] the most prompt tokens that such a batch computes by then."""
    until_s = np.minimum(due_s, spare_s(view, tpot_s))
    fits = {
        seconds: view.profile.prefill_budget(BatchShape(), 0, seconds, BATCH_TOKENS)
        for seconds in set(until_s.tolist())
        if seconds > 0
    }
    return np.array([fits.get(seconds, 0) for seconds in until_s.tolist()], dtype=np.float64)


def prefills_alone(view: View, standing: Standing) -> Choice | None:
    """The longest batch of the kind above; None where there is none."""
    every = chunk.decoding(view)
    queued = ~view.in_decode & view.standard
    if not queued.any():
        return None
    order = by_deadline(view, standing, queued.nonzero()[0])[:PROMPTS]
    due_s = standing.due_unix_s[order] - view.start_unix_s
    beside = chunk.decodes_of(view, every.rows[view.standard[every.rows]])
    return whole_prefills(view, every, beside, order, due_s, spare_s(view, standing.tpot_s))


def _decodes(view: View) -> Rows:
    rows: Rows = (view.in_decode & view.standard).nonzero()[0]
    return rows
