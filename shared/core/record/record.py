"""The life of a record: every event that changes one; no other file does. An event is a pure
function from the stored record to the one to store. It returns None if it does not apply any more:
the request has ended, has moved, was cancelled, or has another owner. states.py says which event
applies in which state; the function also checks the owner, the attempt and the place.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from shared.core.record.states import Event, applies
from shared.core.record.verdict import ended
from shared.request_timeline import TOO_LATE, WHY_MOST, Happened, Happening, Neighbour
from shared.schemas import AttemptOver, KvAt, Record, Resume
from shared.vocabulary import FinishReason, RecordState, ReplicaId, ServiceClass

# Reasons for an attempt's end that end the request; after any other it goes on elsewhere.
FINAL = frozenset(reason.value for reason in FinishReason)

ENGINE_DIED = "engine died"  # or hung and was killed, while it computed the attempt
ENGINES_MOST = 2  # a request fails once so many engines have died so with it
BREAKS_ENGINES = "The engines of two replicas stopped while they computed this request"


class Apart(NamedTuple):
    """A request that decodes at `then`, which fetches its KV from `address`, of its first place."""

    then: ReplicaId
    address: str


NO_MODEL = "No replica serves the model"
OVER_CONTEXT = "This model's maximum context length is"


# ------------------------------------------------------------ towards a replica


def placed(
    record: Record,
    owner: str,
    replica: ReplicaId,
    incarnation: str,
    *,
    attempt: int,
    apart: Apart | None = None,
    now_unix_s: float | None = None,
    declined: str = "",
) -> Record | None:
    """Its owner, an admission, names the next place, and concludes its offer there once this is
    stored. `attempt`: the newest that it knows. `apart`: where it goes on once its prompt is
    computed. If the record still names a replica, that one has declined, and `declined` says why.
    Without `now_unix_s` no timeline is kept, here and in other events, as in the simulator.
    """
    if not applies(Event.PLACED, record) or (record.owner, record.attempt) != (owner, attempt):
        return None
    record = _noted(record, now_unix_s, *_decline(record, now_unix_s, declined))
    kv = record.kv if record.kv is not None and record.kv.tokens else None
    if apart is not None:
        kv = KvAt(replica=replica, address=apart.address, tokens=0)
    at = _at(record, owner, replica, incarnation, ServiceClass.STANDARD)
    return replace(at, then=None if apart is None else apart.then, kv=kv)


def drawn(
    record: Record,
    owner: str,
    replica: ReplicaId,
    incarnation: str,
    service_class: ServiceClass,
    *,
    now_unix_s: float | None = None,
) -> Record | None:
    """Relegation, which holds the lease of the pool, takes it out of there and names a place."""
    if not applies(Event.DRAWN, record):
        return None
    if now_unix_s is not None:
        steps = [Happening(at_unix_s=now_unix_s, what=Happened.DRAWN, replica=replica)]
        if service_class is ServiceClass.STANDARD:
            steps.append(Happening(at_unix_s=now_unix_s, what=Happened.PROMOTED, replica=replica))
        record = _noted(record, now_unix_s, *steps)
    return replace(_at(record, owner, replica, incarnation, service_class), then=None)


def held(record: Record, replica: ReplicaId, incarnation: str, *, attempt: int) -> Record | None:
    """A worker may take the attempt in only if the record names this place. Nothing is written: it
    would be one more write per request, and the worker can always be asked (`Holdings`).
    """
    place = (record.attempt, record.replica, record.incarnation)
    if not applies(Event.HELD, record) or place != (attempt, replica, incarnation):
        return None
    return record


def declined(
    record: Record, owner: str, *, attempt: int, now_unix_s: float | None = None, why: str = ""
) -> Record | None:
    """The chosen replica certainly does not hold it, so it goes back into the pool. An admission
    does not use this: it names the next place (`placed`), or gives up.
    """
    if not applies(Event.DECLINED, record) or (record.owner, record.attempt) != (owner, attempt):
        return None
    record = _noted(record, now_unix_s, *_decline(record, now_unix_s, why))
    return _in_pool(record, now_unix_s, "declined")


def relegated(
    record: Record,
    owner: str,
    *,
    now_unix_s: float | None = None,
    why: str = "",
    declined: str = "",
    neighbours: Sequence[Neighbour] = (),
) -> Record | None:
    """Its owner found no replica for its SLO, so it goes into the pool. `neighbours`: the requests
    whose prefills come before its own.
    """
    if not applies(Event.RELEGATED, record) or record.owner != owner:
        return None
    record = _noted(record, now_unix_s, *_decline(record, now_unix_s, declined))
    return _in_pool(record, now_unix_s, why, neighbours)


# ------------------------------------------------------------ after an attempt


def settled(record: Record, over: AttemptOver, owner: str, now_unix_s: float) -> Record | None:
    """The attempt is over: the request ends, or goes on with an admission (`owner`) or pool."""
    place = (record.attempt, record.replica, record.incarnation)
    if not applies(Event.SETTLED, record) or place != (
        over.attempt,
        over.replica,
        over.incarnation,
    ):
        return None
    why = _end_of(record, over.resume, over.why)
    if why in FINAL or record.cancelled:
        return ended(
            record,
            FinishReason(why) if why in FINAL else FinishReason.CANCELLED,
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
    if over.why == ENGINE_DIED:
        record = replace(record, engines_died=record.engines_died + 1)
        if record.engines_died >= ENGINES_MOST:
            return _breaking(record, over.resume, now_unix_s)
    waiting = replace(_waiting(record, owner, over.resume, over.why), kv=over.kv)
    best_effort = over.why == "relegated" or over.service_class is ServiceClass.BEST_EFFORT
    why = TOO_LATE if over.why == "relegated" else over.why
    return _in_pool(waiting, now_unix_s, why) if best_effort else waiting


def moved(record: Record, seen: Record, owner: str, now_unix_s: float) -> Record | None:
    """The sweep of admission `owner` takes over a request whose owner is gone, or whose attempt was
    never taken in by the worker. `seen`: the record that the sweep judged.
    """
    if not applies(Event.MOVED, record) or not _same_place(record, seen):
        return None
    if record.cancelled:
        return ended(record, FinishReason.CANCELLED, record.resume, now_unix_s)
    waiting = _waiting(_gone(record, now_unix_s, "not held"), owner, None, record.left)
    best_effort = record.service_class is ServiceClass.BEST_EFFORT
    return _in_pool(waiting, now_unix_s, "not held") if best_effort else waiting


def lost(
    record: Record,
    seen: Record,
    owner: str,
    now_unix_s: float,
    *,
    resume: Resume,
    why: str = "",
    relegated: bool = False,
    limit: int,
) -> Record | None:
    """The replica is lost and fenced, and admission `owner` read its log: the attempt made
    `resume`, ended for `why` (empty if it did not end) and was `relegated` or not. At the `limit`th
    loss the request fails, since it may be what breaks engines.
    """
    if not applies(Event.LOST, record) or not _same_place(record, seen):
        return None
    why = _end_of(record, resume, why)
    if why in FINAL:
        return ended(record, FinishReason(why), resume, now_unix_s, relegated=relegated)
    if record.cancelled:
        return ended(record, FinishReason.CANCELLED, resume, now_unix_s)
    if why == ENGINE_DIED:
        record = replace(record, engines_died=record.engines_died + 1)
        if record.engines_died >= ENGINES_MOST:
            return _breaking(record, resume, now_unix_s)
    losses = record.lost + 1
    if losses >= limit:
        message = f"the replicas of {losses} attempts were lost"
        return ended(record, FinishReason.FAILED, resume, now_unix_s, message=message)
    left = _gone(replace(record, resume=resume), now_unix_s, "lost")
    waiting = replace(_waiting(left, owner, None, "lost"), lost=losses)
    best_effort = relegated or record.service_class is ServiceClass.BEST_EFFORT
    return _in_pool(waiting, now_unix_s, "lost") if best_effort else waiting


# ------------------------------------------------------------ ends without an attempt


def cancelled(record: Record) -> Record | None:
    """The tombstone of a cancel. A replica that holds the request reads the cancel itself."""
    return replace(record, cancelled=True) if applies(Event.CANCELLED, record) else None


def closed(record: Record, now_unix_s: float) -> Record | None:
    """A cancelled request that no replica can hold ends."""
    if not applies(Event.CLOSED, record):
        return None
    return ended(record, FinishReason.CANCELLED, record.resume, now_unix_s)


def refused(
    record: Record,
    owner: str,
    now_unix_s: float,
    *,
    message: str,
    retry_after_s: float,
    declined: str = "",
) -> Record | None:
    """Its owner, an admission, found no replica, and the client does not want best-effort."""
    if not applies(Event.REFUSED, record) or record.owner != owner:
        return None
    record = _noted(record, now_unix_s, *_decline(record, now_unix_s, declined))
    return ended(
        record,
        FinishReason.REFUSED,
        record.resume,
        now_unix_s,
        message=message,
        retry_after_s=retry_after_s,
    )


def expired(record: Record, now_unix_s: float) -> Record | None:
    """The request ends: it stayed in the pool for as long as its client allows it to stay open."""
    if not applies(Event.EXPIRED, record):
        return None
    return ended(record, FinishReason.EXPIRED, record.resume, now_unix_s)


def fitted(record: Record, context_tokens: int, now_unix_s: float) -> Record | None:
    """The request was received while no worker was known, and now the fleet's longest context is.
    Its `max_tokens` is cut to that; if its prompt fits nowhere, the request ends.
    """
    room = context_tokens - record.prompt_tokens
    if not applies(Event.FITTED, record) or record.max_tokens <= room:
        return None
    if room < 1:
        message = does_not_fit(record.prompt_tokens, context_tokens)
        return ended(record, FinishReason.INVALID, record.resume, now_unix_s, message=message)
    if record.resume.measure.tokens >= room:
        return ended(record, FinishReason.LENGTH, record.resume, now_unix_s)
    return replace(record, max_tokens=room)


def unserved(record: Record, now_unix_s: float) -> Record | None:
    """The request ends: the model that it waits for has left the fleet."""
    if not applies(Event.UNSERVED, record):
        return None
    message = f"{NO_MODEL} `{record.model}` any more"
    return ended(record, FinishReason.INVALID, record.resume, now_unix_s, message=message)


def does_not_fit(prompt_tokens: int, context_tokens: int, *, at_least: bool = False) -> str:
    """OpenAI's words, known to clients, for too long a prompt. `at_least`: not fully counted."""
    tokens = f"at least {prompt_tokens}" if at_least else f"{prompt_tokens}"
    return (
        f"{OVER_CONTEXT} {context_tokens} tokens. However, your prompt has {tokens} tokens, and"
        " an answer needs one more. Please reduce the length of the prompt."
    )


def as_logged(record: Record, attempt: int, replica: ReplicaId, incarnation: str) -> Record:
    """A deleted record as last known, moved to the newest attempt that a log has. Not an event."""
    return replace(record, attempt=attempt, replica=replica, incarnation=incarnation)


def deleted(
    record: Record, now_unix_s: float, *, resume: Resume, why: str, relegated: bool
) -> Record:
    """The end of a request whose record, last known as this, was deleted. Else as for `lost`."""
    return ended(
        record,
        FinishReason(why) if why in FINAL else FinishReason.FAILED,
        resume,
        now_unix_s,
        message="" if why in FINAL else "its record was deleted",
        relegated=relegated,
    )


def without_output(record: Record, output_key: str) -> Record:
    """The same ended record, its output stored apart under `output_key`. Its state stays."""
    kept = Resume(measure=record.resume.measure, diary=record.resume.diary)
    return replace(record, resume=kept, output_key=output_key)


# ------------------------------------------------------------ states


def _end_of(record: Record, resume: Resume, why: str) -> str:
    """Why an attempt ended: LENGTH if no token is left to make, which no planner would plan."""
    whole = why not in FINAL and resume.measure.tokens >= record.max_tokens
    return FinishReason.LENGTH.value if whole else why


def _breaking(record: Record, resume: Resume, now_unix_s: float) -> Record:
    """The end of a request that killed engines. It is invalid, since clients resend what failed."""
    message = f"{BREAKS_ENGINES}: no third one is given it."
    return ended(record, FinishReason.INVALID, resume, now_unix_s, message=message)


def _at(
    record: Record, owner: str, replica: ReplicaId, incarnation: str, service_class: ServiceClass
) -> Record:
    return replace(
        record,
        state=RecordState.ACTIVE,
        owner=owner,
        attempt=record.attempt + 1,
        replica=replica,
        incarnation=incarnation,
        service_class=service_class,
        relegated=record.relegated or service_class is ServiceClass.BEST_EFFORT,
    )


def _waiting(record: Record, owner: str, resume: Resume | None, left: str) -> Record:
    return replace(
        record,
        state=RecordState.ACTIVE,
        owner=owner,
        replica=None,
        incarnation="",
        resume=resume or record.resume,
        left=left,
    )


def _in_pool(
    record: Record, now_unix_s: float | None, why: str, neighbours: Sequence[Neighbour] = ()
) -> Record:
    if now_unix_s is not None:
        step = Happening(
            at_unix_s=now_unix_s, what=Happened.RELEGATED, why=why, neighbours=tuple(neighbours)
        )
        record = _noted(record, now_unix_s, step)
    return replace(
        record,
        state=RecordState.RELEGATED,
        service_class=ServiceClass.BEST_EFFORT,
        relegated=True,
        replica=None,
        incarnation="",
    )


def _noted(record: Record, now_unix_s: float | None, *happenings: Happening) -> Record:
    """The record with these steps in its timeline; unchanged where no timeline is kept."""
    timeline = record.resume.diary
    if now_unix_s is None or (record.attempt and not timeline.account.until_unix_s):
        return record
    timeline = timeline.waited(record.arrived_unix_s, now_unix_s).noted(*happenings)
    return replace(record, resume=replace(record.resume, diary=timeline))


def _decline(record: Record, now_unix_s: float | None, why: str) -> list[Happening]:
    """The timeline's step if the replica that the record names has declined; else none."""
    if record.replica is None or now_unix_s is None:
        return []
    step = Happening(
        at_unix_s=now_unix_s, what=Happened.DECLINED, replica=record.replica, why=why[:WHY_MOST]
    )
    return [step]


def _gone(record: Record, now_unix_s: float, why: str) -> Record:
    """The record, with a step that says that the replica it names no longer has the request."""
    if record.replica is None:
        return record
    step = Happening(at_unix_s=now_unix_s, what=Happened.LEFT, replica=record.replica, why=why)
    return _noted(record, now_unix_s, step)


def _same_place(record: Record, seen: Record) -> bool:
    """True if attempt, place and owner are still those that the sweep saw."""
    return (record.attempt, record.replica, record.incarnation, record.owner) == (
        seen.attempt,
        seen.replica,
        seen.incarnation,
        seen.owner,
    )
