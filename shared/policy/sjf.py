"""Shortest job first (QoServe section 2.4): by the whole prompt, as outputs are not known; a
prefill begun is not overtaken.
"""

import numpy as np

from shared.policy.chunk import PREFILL, Rows
from shared.policy.sarathi import Sarathi, Settings
from shared.policy.seam import Floats, View


def sjf(settings: Settings) -> Sarathi:
    return Sarathi("sjf", size, settings)


def size(view: View, queue: Rows) -> Floats:
    return np.where(view.phase[queue] == PREFILL, 0.0, view.target_tokens[queue])
