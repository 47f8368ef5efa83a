"""Hurry: whole answers for which iterations are not made shorter, since that would cost more
requests than it saves.

Until its TTLT each decode has so much time for each token that may still come, and the one with the
least sets the length of the iterations. The shorter these are, the more of the time their passes
take, and the less is left for prefills. So where not all can be in time, some decodes whose TTLT
asks for a faster pace than their own are let go, those with the least time for each token: as many
as gains most. To keep the others gains their importance. It costs the time of the passes beyond
those that the rest needs, counted in requests as dear as the dearest of those that give way. What
is let go runs on, at its own pace, or at that of the others.
"""

import numpy as np

from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.seam import View
from shared.policy.slackline.due import LOOSE_S, Due
from shared.policy.slackline.price import Prices
from shared.policy.slackline.token_order import MARGIN_S
from shared.policy.slackline.work_ahead import work_of_rows

# Passes that take less of the time than this are no hurry.
CALM = 0.25


def without_hurry(view: View, due: Due, decodes: Rows, gone: Rows, prices: Prices) -> Due:
    """The bounds without those by which a decode would cost more than it is worth. `decodes`: the
    standard ones; `gone`: the prefills that cannot all be in time.
    """
    rows = decodes[(view.has_ttlt & (due.pace_s < view.tightest_tbt_s))[decodes]]
    if not len(rows):
        return due
    pass_s = view.profile.batch_s(chunk.decodes_of(view, decodes))
    pace_s = np.maximum(due.pace_s[rows], pass_s + 2 * MARGIN_S)
    rows = rows[order := pace_s.argsort(kind="stable")]
    pace_s, until_s = pace_s[order], view.last_due_unix_s[rows] - view.start_unix_s
    calm_s = min(pass_s / CALM, float(pace_s[-1]))
    hurried = ((pace_s < calm_s) & (until_s > 0)).nonzero()[0]
    if not len(hurried):
        return due
    rows, pace_s, until_s = rows[hurried], pace_s[hurried], until_s[hurried]
    work = work_of_rows(view, due, gone, prices)
    request_s = float((work.seconds + work.output_tokens * work.decode_s).max())
    # of those from each on: their importance, and for how long they hurry
    worth = view.importance[rows][::-1].cumsum()[::-1]
    for_s = until_s[::-1].cumsum()[::-1] / np.arange(len(rows), 0, -1)
    requests = pass_s * (1 / pace_s - 1 / calm_s) * for_s / max(request_s, 1e-9)
    gain = worth - requests * float(work.value.mean())
    first = int(gain.argmax())
    let_go = rows[:first] if gain[first] > 0 else rows
    if not len(let_go):
        return due
    paces_s = due.pace_s.copy()
    paces_s[let_go] = np.clip(view.tightest_tbt_s[let_go], paces_s[let_go], LOOSE_S)
    return due._replace(pace_s=paces_s)
