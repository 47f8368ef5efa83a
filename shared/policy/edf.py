"""Earliest deadline first (Sarathi-EDF in QoServe section 4)."""

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.sarathi import Sarathi, Settings
from shared.policy.seam import Floats, View


def edf(settings: Settings) -> Sarathi:
    return Sarathi("edf", deadline, settings)


def deadline(view: View, queue: Rows) -> Floats:
    """The sooner of the next token's deadline and TTLT."""
    due: Floats = np.minimum(view.next_due_unix_s[queue], view.last_due_unix_s[queue])
    return due
