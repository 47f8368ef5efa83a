"""Finds and drops requests that are past their deadline (Ascendra paper, sections 6.3 and 8.6)."""

from dataclasses import replace

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.seam import Bools, Choice, Phase, View
from shared.vocabulary import FinishReason

WAITING = int(Phase.WAITING)


def unstarted(view: View) -> Bools:
    """[rows] standard requests of which nothing has ever been computed."""
    new: Bools = (view.phase == WAITING) & (view.generated_tokens == 0) & view.standard
    return new


def past_due(view: View) -> Rows:
    """Waiting requests whose deadline for the first token, or the last, has passed."""
    due = np.minimum(view.first_due_unix_s, view.last_due_unix_s)
    return (unstarted(view) & (due < view.start_unix_s)).nonzero()[0]


def dropping(view: View, choice: Choice, late: Rows) -> Choice:
    """The choice, with these rows dropped. It is good for once, since others may be late then."""
    slots = view.slot[late].tolist()
    return replace(
        choice, release=[(slot, FinishReason.DROPPED.value) for slot in slots], repeats=1
    )
