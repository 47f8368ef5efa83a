"""The explanation of a request for people, from its record and timeline: was it late, and why."""

import math
from collections.abc import Sequence

from msgspec.structs import replace

from shared.core.record.blame import first_missed
from shared.core.record.states import State, state_of
from shared.core.record.verdict import GOOD_ENDS
from shared.measure import Measure
from shared.request_timeline import (
    CAUSES,
    Account,
    Cause,
    Happened,
    Neighbour,
    RequestTimeline,
    merged,
)
from shared.schemas import Explanation, FirstMissed, Record, Resume, Share, Verdict
from shared.vocabulary import FinishReason

# where the time of a request goes, for people
WORDS = {
    Cause.PLACING: "looking for a replica",
    Cause.RELEGATED: "waiting as best-effort",
    Cause.MOVING: "moving to another replica",
    Cause.QUEUE: "queue of the replica",
    Cause.PREFILL: "its own prefill",
    Cause.BESIDE: "beside prefills of others",
    Cause.DECODES: "decodes",
    Cause.DRAFTS: "drafts",
    Cause.SAT_OUT: "left out of iterations",
    Cause.CONTROL: "control, between iterations",
}
SHORT_S = 0.1  # shorter times are in ms
CLEAR_S = 1e-6  # instants are not known more exactly
SILENT_S = 1.0  # a replica silent for longer is not merely between two iterations


def explanation(
    record: Record, resume: Resume, now_unix_s: float, *, trace_id: str, whole: bool
) -> Explanation:
    """The explanation of a request with this output so far; `whole`: names other tenants, too."""
    tenant, _, request_id = record.key.partition(".")
    timeline = _until_now(record, resume.diary, now_unix_s)
    verdict, measure = record.verdict, resume.measure
    if not whole:
        timeline = _seen_by(tenant, timeline)
    if verdict is None:
        missed = first_missed(
            record.judged_slo, record.arrived_unix_s, measure, timeline, now_unix_s, good=False
        )
    else:
        missed = verdict.first_missed
    until_missed = _until_missed(timeline, missed)
    made = measure.tokens
    return Explanation(
        request_id=request_id,
        tenant=tenant,
        tier=record.tier,
        answer=_answer(record, measure, timeline, missed),
        state=state_of(record).value,
        slo=record.judged_slo,
        service_class=record.service_class if verdict is None else verdict.service_class,
        relegated=record.relegated,
        arrived_unix_s=record.arrived_unix_s,
        until_unix_s=timeline.account.until_unix_s or record.arrived_unix_s,
        attempt=record.attempt,
        replica=record.replica,
        prompt_tokens=record.prompt_tokens,
        output_tokens=made,
        ttft_s=measure.first_unix_s - record.arrived_unix_s if made else None,
        worst_tbt_s=measure.worst_tbt_s if made > 1 else None,
        ttlt_s=measure.last_unix_s - record.arrived_unix_s if made else None,
        trace_id=trace_id,
        first_missed=missed,
        shares=shares(timeline.account),
        shares_until_missed=shares(until_missed) if missed else [],
        neighbours=list((until_missed if missed else timeline.account).neighbours),
        happenings=list(timeline.happenings),
        left_out=timeline.left_out,
        verdict=verdict,
        model=record.model,
        task=record.task,
    )


def shares(account: Account) -> list[Share]:
    """The causes that took a microsecond or more, the largest first. Their shares add up to 1."""
    found = [(account.seconds(cause), cause) for cause in CAUSES]
    found = sorted((each for each in found if each[0] >= CLEAR_S), key=lambda each: -each[0])
    total_s = sum(seconds for seconds, _ in found)
    return [
        Share(cause=cause, seconds=seconds, share=seconds / total_s) for seconds, cause in found
    ]


def _until_now(record: Record, timeline: RequestTimeline, now_unix_s: float) -> RequestTimeline:
    """The timeline until now; a request that no replica reports has waited since."""
    if record.verdict is not None:
        return timeline
    silent_s = now_unix_s - (timeline.account.until_unix_s or record.arrived_unix_s)
    if state_of(record) in (State.PLACED, State.CANCELLED_PLACED) and silent_s < SILENT_S:
        return timeline
    return timeline.waited(record.arrived_unix_s, now_unix_s)


def _until_missed(timeline: RequestTimeline, missed: FirstMissed | None) -> Account:
    if missed is not None and timeline.late is not None and missed.token == timeline.late.token:
        return timeline.late.account
    return timeline.account


def _seen_by(tenant: str, timeline: RequestTimeline) -> RequestTimeline:
    """The timeline without the names of other tenants."""

    def hidden(neighbours: Sequence[Neighbour]) -> tuple[Neighbour, ...]:
        return merged(
            n if n.tenant == tenant else Neighbour("", "", n.requests, n.seconds)
            for n in neighbours
        )

    def of(account: Account) -> Account:
        return replace(account, neighbours=hidden(account.neighbours))

    late = timeline.late
    return replace(
        timeline,
        account=of(timeline.account),
        happenings=tuple(
            replace(step, neighbours=hidden(step.neighbours)) for step in timeline.happenings
        ),
        late=None if late is None else replace(late, account=of(late.account)),
    )


# ------------------------------------------------------------ the sentence


def answer(record: Record) -> str:
    """The sentence about a request that has ended."""
    assert record.verdict is not None
    resume = record.resume
    return _answer(record, resume.measure, resume.diary, record.verdict.first_missed)


def _answer(
    record: Record, measure: Measure, timeline: RequestTimeline, missed: FirstMissed | None
) -> str:
    verdict, of_task = record.verdict, _of_task(record, timeline)
    if missed is None:
        return f"{_standing(record, verdict)}{_first_token(record, measure)}{of_task}."
    account = _until_missed(timeline, missed)
    what = {0: "its last token", 1: "its first token"}.get(
        missed.token, f"its token {missed.token}"
    )
    late_s = 0.0 if missed.came_s is None else missed.came_s - missed.due_s
    decimals = _decimals(late_s)
    if missed.came_s is not None:
        came = f"came at {in_seconds(missed.came_s, decimals)}"
    else:
        came = "never came" if verdict is not None else "has not come yet"
    by = f" by {in_seconds(late_s, decimals)}" if late_s >= CLEAR_S else ""
    due = f"due at {in_seconds(missed.due_s, decimals)}"
    spent_s = account.seconds(missed.cause)
    went = f"{in_seconds(spent_s)} of that went into {why(record, timeline, account, missed.cause)}"
    return f"late{by}: {what} was {due} and {came}; {went}{of_task}."


def _standing(record: Record, verdict: Verdict | None) -> str:
    if verdict is None:
        where = {
            State.WAITING: "it still looks for a replica",
            State.RELEGATED: "it waits in the best-effort pool",
            State.PLACED: f"it still runs on {record.replica}",
        }.get(state_of(record), "its cancel is under way")
        return f"on time so far: {where}"
    if verdict.finish_reason in GOOD_ENDS:
        return "on time: it met its SLO" if verdict.slo_met else "late, and nobody kept account"
    told = f" ({verdict.message})" if verdict.message else ""
    if verdict.finish_reason is FinishReason.REFUSED:
        return f"refused{told}"
    return f"{verdict.finish_reason.value}{told} before it missed a deadline"


def _of_task(record: Record, timeline: RequestTimeline) -> str:
    """The round that the request is of its task, and the time that the task has left."""
    task, verdict = record.task, record.verdict
    if task is None:
        return ""
    until_unix_s = timeline.account.until_unix_s or record.arrived_unix_s
    left_s = task.due_unix_s - (until_unix_s if verdict is None else verdict.ended_unix_s)
    left = f"has {in_seconds(left_s)} left" if left_s >= 0 else f"is {in_seconds(-left_s)} late"
    return f"; round {task.number} of a task that {left}"


def _first_token(record: Record, measure: Measure) -> str:
    due_unix_s = record.slo.first_due_unix_s(record.arrived_unix_s)
    due = f" was due at {in_seconds(due_unix_s - record.arrived_unix_s)} and"
    if not math.isfinite(due_unix_s):
        due = ""
    if not measure.tokens:
        return f"; its first token{due} has not come" if record.verdict is None else ""
    return (
        f"; its first token{due} came at {in_seconds(measure.first_unix_s - record.arrived_unix_s)}"
    )


def why(record: Record, timeline: RequestTimeline, account: Account, cause: Cause) -> str:
    """The words for a cause, with the requests and tenants that it has to do with."""
    match cause:
        case Cause.PLACING:
            declined = [h.replica for h in timeline.happenings if h.what is Happened.DECLINED]
            asked = f"; {named(declined)} declined it" if declined else ""
            return f"looking for a replica{asked}"
        case Cause.RELEGATED:
            return f"waiting as best-effort{_relegated(timeline, account)}"
        case Cause.MOVING:
            left = [
                f"{h.replica} ({h.why})" for h in timeline.happenings if h.what is Happened.LEFT
            ]
            return f"moving to another replica{' from ' + named(left) if left else ''}"
        case Cause.QUEUE:
            return f"waiting in the queue of a replica{_behind(account)}"
        case Cause.PREFILL:
            return f"its own prefill of {record.prompt_tokens:,} tokens"
        case Cause.BESIDE:
            return f"the prefills of {others(account.neighbours)}, beside which it ran"
        case Cause.DECODES:
            return "decodes, its own and those that ran beside it"
        case Cause.DRAFTS:
            return "drafting tokens"
        case Cause.SAT_OUT:
            dropped = sum(h.what is Happened.PREEMPTED for h in timeline.happenings)
            times = f"; it was preempted {dropped} times" if dropped > 1 else ""
            times = "; it was preempted" if dropped == 1 else times
            return f"iterations that left it out after it had begun{times}"
        case Cause.CONTROL:
            return "the time between iterations, when the engine waited for a plan or was late"
    return "causes that nobody kept account of"


def _behind(account: Account) -> str:
    return f" behind prefills of {others(account.neighbours)}" if account.neighbours else ""


def _relegated(timeline: RequestTimeline, account: Account) -> str:
    """The relegation in words: which service relegated, and which tenants' load made it."""
    step = next((h for h in timeline.happenings if h.what is Happened.RELEGATED), None)
    if step is None:
        return ""
    told = f": {step.replica} relegated it" if step.replica else f": {step.why}"
    if step.neighbours:
        wait_s = sum(n.seconds for n in step.neighbours)
        return f"{told}; {in_seconds(wait_s)} of prefills of {others(step.neighbours)} came first"
    return f"{told}{',' if account.neighbours else ''}{_behind(account)}"


def others(neighbours: Sequence[Neighbour]) -> str:
    """The neighbours in words: how many requests, and whose."""
    number = sum(n.requests for n in neighbours)
    whose = [f"{n.requests} of {n.tenant}/{n.tier}" for n in neighbours if n.tenant]
    rest = sum(n.requests for n in neighbours if not n.tenant)
    if rest and whose:
        whose.append(f"{rest} of others")
    told = f" ({', '.join(whose)})" if whose else ""
    return f"{number} other request{'' if number == 1 else 's'}{told}"


def named(names: Sequence[str]) -> str:
    """The names, each once: `a, b and c`."""
    *first, last = dict.fromkeys(names)
    return f"{', '.join(first)} and {last}" if first else last


def in_seconds(seconds: float, decimals: int = 2) -> str:
    """A time in words: in ms below 0.1 s, else in s with this many decimals, 2 or more."""
    if seconds >= SHORT_S:
        return f"{seconds:.{decimals}f} s"
    return f"{seconds * 1000:.{max(decimals - 3, 0)}f} ms"


def _decimals(late_s: float) -> int:
    """The decimals of a second that show by how much a token was late."""
    if CLEAR_S <= late_s < SHORT_S:
        return max(-math.floor(math.log10(late_s)), 3)
    return 2
