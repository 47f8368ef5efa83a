"""A(r): the tokens that a request must have accepted in this iteration to keep its pace ([adaserve]
section 3).

The paper's only SLO is the mean time per output token. Other SLOs are read as follows:
- *A TTLT*: the most tokens that may be left are spread evenly over the time left. The larger of the
  two needs counts.
- *Stages with paces of their own*: the pace of the present stage is held over the whole output.
- *Neither, or best-effort, or past its TTLT*: nothing is needed; throughput decides.
"""

import numpy as np

from shared.policy.chunk import Rows
from shared.policy.seam import Floats, View


def needed_tokens(view: View, rows: Rows, iteration_s: float, accepted: float) -> Floats:
    """[rows] A(r) = (l + t_spec) / TPOT - o of these decodes, the root included. The value is at
    least 0; up to 1, a plain decode is enough.

    l is the time in seconds since the first token. o is the number of tokens since then; tokens
    that plans in flight may add (`unsure_tokens`) count as `accepted`, the recent mean of accepted
    drafts. t_spec is `iteration_s`. Source: [adaserve] Eq. 2 and 3.
    """
    generated = view.generated_tokens[rows] + np.minimum(view.unsure_tokens[rows], accepted)
    # a request without a first token has no pace to keep
    with np.errstate(invalid="ignore"):
        spent_s = np.maximum(view.start_unix_s - view.first_token_unix_s[rows], 0.0)
    by_pace: Floats = (spent_s + iteration_s) / view.tbt_s[rows] - (generated - 1)
    by_pace[np.isinf(view.tbt_s[rows])] = 0.0
    left_s = view.last_due_unix_s[rows] - view.start_unix_s
    by_end = np.where(
        left_s > 0,
        (view.max_tokens[rows] - generated) * iteration_s / np.maximum(left_s, iteration_s),
        0.0,
    )
    need: Floats = np.where(view.best_effort[rows], 0.0, np.maximum(by_pace, by_end))
    return need
