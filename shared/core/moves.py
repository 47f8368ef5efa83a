"""What becomes of a request's record when an attempt at it is over: one rule for admission and the
simulator.
"""

from msgspec.structs import replace

from shared.core.verdict import ended
from shared.schemas import AttemptOver, Record, Resume
from shared.vocabulary import FinishReason, ReplicaId, ServiceClass

FINAL = frozenset(reason.value for reason in FinishReason)


def placed_at(
    record: Record, owner: str, replica: ReplicaId, incarnation: str, service_class: ServiceClass
) -> Record:
    """The record naming its next place; written before the offer is made."""
    return replace(
        record,
        state="placing",
        owner=owner,
        attempt=record.attempt + 1,
        replica=replica,
        incarnation=incarnation,
        service_class=service_class,
        relegated=record.relegated or service_class is ServiceClass.BEST_EFFORT,
    )


def relegated(record: Record) -> Record:
    """In the pool: best-effort, with the relegation service."""
    return replace(
        record,
        state="relegated",
        service_class=ServiceClass.BEST_EFFORT,
        relegated=True,
        replica=None,
        incarnation="",
    )


def moved_on(record: Record, resume: Resume, owner: str, why: str) -> Record:
    """The record of a request whose attempt is over without an end: free to be placed again, from
    where it was.
    """
    return replace(
        record, state="placing", owner=owner, replica=None, incarnation="", resume=resume, left=why
    )


def after_attempt(record: Record, over: AttemptOver, owner: str, now_unix_s: float) -> Record:
    """Ended, back to be placed, or in the pool."""
    if over.why in FINAL or record.cancelled:
        reason = FinishReason(over.why) if over.why in FINAL else FinishReason.CANCELLED
        return ended(
            record,
            reason,
            over.resume,
            now_unix_s,
            message=over.message,
            service_class=over.service_class,
            relegated=over.relegated,
        )
    if over.why == "relegated" and not record.allow_relegation:
        return ended(
            record,
            FinishReason.REFUSED,
            over.resume,
            now_unix_s,
            message="its SLO cannot be met",
            retry_after_s=1.0,
        )
    moved = moved_on(record, over.resume, owner, over.why)
    return (
        relegated(moved)
        if over.why == "relegated" or over.service_class is ServiceClass.BEST_EFFORT
        else moved
    )
