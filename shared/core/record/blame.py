"""Finds for a verdict the first deadline that a request missed, and the main cause of that."""

import math

from shared.measure import CLOSE_S, Measure
from shared.request_timeline import Account, Cause, RequestTimeline
from shared.schemas import FirstMissed
from shared.vocabulary import Missed, Slo


def first_missed(
    slo: Slo,
    arrived_unix_s: float,
    measure: Measure,
    timeline: RequestTimeline,
    until_unix_s: float,
    *,
    good: bool,
) -> FirstMissed | None:
    """The first deadline missed by a request that did not meet its SLO. None if it had missed none,
    or if no account of its time was kept. `good`: it ended well, so it owed no more tokens.
    """
    if not timeline.account.until_unix_s:
        return None
    found: list[tuple[float, int, Missed, float | None, Account]] = []
    if (late := timeline.late) is not None:
        bound = Missed.TTFT if late.token == 1 else Missed.TBT
        found.append((late.due_unix_s, late.token, bound, late.came_unix_s, late.account))
    next_due_unix_s = (
        measure.next_due_unix_s if measure.tokens else slo.first_due_unix_s(arrived_unix_s)
    )
    if not good and until_unix_s > next_due_unix_s + CLOSE_S:
        bound = Missed.TBT if measure.tokens else Missed.TTFT
        found.append((next_due_unix_s, measure.tokens + 1, bound, None, timeline.account))
    last_due_unix_s = slo.last_due_unix_s(arrived_unix_s)
    if until_unix_s > last_due_unix_s:
        came = until_unix_s if good else None
        found.append((last_due_unix_s, 0, Missed.TTLT, came, timeline.account))
    if not found and good:
        found.append(_by_pace(slo, measure, timeline))
    if not found:
        return None
    due_unix_s, token, bound, came_unix_s, account = min(found, key=lambda each: each[0])
    due_s = due_unix_s - arrived_unix_s
    granted_s = 0.0
    if token > 1:
        first_due = slo.first_due_unix_s(arrived_unix_s)
        begun = first_due if math.isfinite(first_due) else measure.first_unix_s
        granted_s = max(0.0, due_unix_s - begun)
    cause = main_cause(account, due_s=due_s, granted_s=granted_s)
    return FirstMissed(
        token=token,
        bound=bound,
        due_s=due_s,
        came_s=None if came_unix_s is None else came_unix_s - arrived_unix_s,
        cause=cause,
        cause_s=account.seconds(cause),
    )


def _by_pace(
    slo: Slo, measure: Measure, timeline: RequestTimeline
) -> tuple[float, int, Missed, float | None, Account]:
    """The miss where only the mean pace was late: of the last token, due at that pace."""
    gaps = max(measure.tokens - 1, 0)
    pace_s = slo.pace_s(thinking=False)
    due_unix_s = min(measure.first_unix_s + gaps * pace_s, measure.last_unix_s)
    return due_unix_s, measure.tokens, Missed.TBT, measure.last_unix_s, timeline.account


def main_cause(account: Account, *, due_s: float, granted_s: float) -> Cause:
    """The cause of a missed deadline, `due_s` after arrival; `granted_s` of that is the pace of the
    tokens after the first. It is the request's own prefill, if that took longer than was left for
    it. Else it is what took most; decodes and drafts count beyond the pace.
    """
    if account.prefill_s > due_s - granted_s:
        return Cause.PREFILL
    work_s = account.decodes_s + account.drafts_s
    beyond = max(0.0, work_s - granted_s) / work_s if work_s > 0.0 else 0.0
    lost: dict[Cause, float] = {
        cause: account.seconds(cause)
        for cause in Cause
        if cause not in (Cause.NOTHING, Cause.PREFILL, Cause.DECODES, Cause.DRAFTS)
    }
    lost[Cause.DECODES] = account.decodes_s * beyond
    lost[Cause.DRAFTS] = account.drafts_s * beyond
    worst = max(lost, key=lambda cause: lost[cause])
    return worst if lost[worst] > 0.0 else Cause.PREFILL
