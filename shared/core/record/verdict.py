"""Writes the verdict into the record of an ended request: why it ended, and if its SLO was met."""

import math

from msgspec.structs import replace

from shared.core.record.blame import first_missed
from shared.core.record.judgement import missed
from shared.schemas import Record, Resume, Verdict
from shared.vocabulary import FinishReason, Missed, RecordState, ServiceClass

GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def ended(
    record: Record,
    reason: FinishReason,
    resume: Resume,
    now_unix_s: float,
    *,
    message: str = "",
    retry_after_s: float | None = None,
    service_class: ServiceClass | None = None,
    relegated: bool = False,
) -> Record:
    """The record with its verdict. Only a request that ended well can have met its SLO."""
    measure = resume.measure
    tokens = len(resume.tokens) // 4
    thinking = measure.thought(record.slo)
    arrived, slo = record.arrived_unix_s, record.judged_slo
    good = reason in GOOD_ENDS
    broke = missed(measure, slo, arrived) if good else Missed.END
    ended_unix_s = measure.last_unix_s if tokens and good else now_unix_s
    resume = _complete(record, resume, ended_unix_s)
    verdict = Verdict(
        finish_reason=reason,
        slo_met=broke is Missed.NOTHING,
        missed=broke,
        relegated=record.relegated or relegated,
        service_class=service_class or record.service_class,
        prompt_tokens=record.prompt_tokens,
        output_tokens=tokens,
        attempts=record.attempt,
        ttft_s=max(0.0, measure.first_unix_s - arrived) if tokens else None,
        worst_tbt_s=measure.worst_tbt_s if tokens > 1 else None,
        mean_tpot_s=(measure.last_unix_s - measure.first_unix_s) / (tokens - 1)
        if tokens > 1
        else None,
        ttlt_s=max(0.0, measure.last_unix_s - arrived) if tokens else None,
        ended_unix_s=ended_unix_s,
        replica=record.replica,
        message=message,
        retry_after_s=None if retry_after_s is None else float(math.ceil(retry_after_s)),
        thinking_tokens=thinking,
        cached_tokens=min(resume.cached_tokens, record.prompt_tokens),
        thinking_tpot_s=(measure.thought_unix_s - measure.first_unix_s) / (thinking - 1)
        if thinking > 1
        else None,
        first_missed=None
        if broke is Missed.NOTHING
        else first_missed(slo, arrived, measure, resume.diary, ended_unix_s, good=good),
        task_left_s=None if record.task is None else record.task.due_unix_s - ended_unix_s,
    )
    return replace(
        record, state=RecordState.ENDED, verdict=verdict, resume=resume, relegated=verdict.relegated
    )


def _complete(record: Record, resume: Resume, ended_unix_s: float) -> Resume:
    """The output, with its timeline carried on until the end, if it has a timeline."""
    timeline = resume.diary
    if not timeline.account.until_unix_s:
        return resume
    return replace(resume, diary=timeline.waited(record.arrived_unix_s, ended_unix_s))
