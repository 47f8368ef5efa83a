"""Shortest remaining prefill first (Sarathi-SRPF in QoServe sections 2.4 and 4.2): a shorter
arrival overtakes a prefill begun.
"""

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.sarathi import Sarathi, Settings
from shared.policy.seam import Floats, View


def srpf(settings: Settings) -> Sarathi:
    return Sarathi("srpf", remaining, settings)


def remaining(view: View, queue: Rows) -> Floats:
    left: Floats = (view.target_tokens[queue] - view.computed_tokens[queue]).astype(np.float64)
    return left
