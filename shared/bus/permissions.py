"""The permissions of each user of the bus, as one table: for the NATS server's users (`slackline
keys`), docs/security.md, and the check of every answer. The operator may do everything; only the
operator makes streams.

In a subject `{tenant}` and `{replica}` stand for the user's own name if it is one, else for any;
`{log}` for the stream of the replica's log, `{service}` for each name that the role serves under.
"""

import functools
from dataclasses import dataclass

from shared import subjects
from shared.bus.matching import matches
from shared.bus.users import Role, User, owner_of
from shared.subjects import ROOT

GATEWAY, ADMISSION, PLANNER = Role.GATEWAY, Role.ADMISSION, Role.PLANNER
RELEGATION, WORKER, TENANT = Role.RELEGATION, Role.WORKER, Role.TENANT
SERVICES = (ADMISSION, PLANNER, RELEGATION, WORKER)
# the names of each role in the services API
SERVES = {
    ADMISSION: ("admission", "requests"),
    PLANNER: ("planner", "seat"),
    RELEGATION: ("relegation",),
    WORKER: ("worker",),
}
VERBS = ("PING", "INFO", "STATS")
DIRECT, INFO = "$JS.API.DIRECT.GET", "$JS.API.STREAM.INFO"
PURGE = "$JS.API.STREAM.PURGE"
REQUESTS, LEASES = f"KV_{subjects.REQUESTS_BUCKET}", f"KV_{subjects.LEASES_BUCKET}"
BODIES = f"KV_{subjects.BODIES_BUCKET}"
BATCHES, FILES = f"KV_{subjects.BATCHES_BUCKET}", f"OBJ_{subjects.FILES_BUCKET}"
USAGE, HISTORY = f"KV_{subjects.USAGE_BUCKET}", f"KV_{subjects.HISTORY_BUCKET}"


@dataclass(frozen=True, slots=True)
class Row:
    """The roles that may publish on a subject, and those that may subscribe to it."""

    what: str
    subject: str
    publish: tuple[Role, ...] = ()
    subscribe: tuple[Role, ...] = ()


def _replica(kind: str) -> str:
    return f"{ROOT}.replica.{{replica}}.{kind}"


TABLE = (
    # clients
    Row("requests", f"{ROOT}.requests.{{tenant}}.*", (TENANT, GATEWAY), (ADMISSION,)),
    Row("questions for output", f"{ROOT}.attach.{{tenant}}", (TENANT, GATEWAY), (ADMISSION,)),
    Row("questions for reasons", f"{ROOT}.explain.{{tenant}}", (TENANT, GATEWAY), (ADMISSION,)),
    Row("those of the operator", subjects.EXPLAIN_ALL, (), (ADMISSION,)),
    Row("questions for history", f"{ROOT}.history.{{tenant}}", (TENANT,), (ADMISSION,)),
    Row("those of the operator", subjects.HISTORY_ALL, (), (ADMISSION,)),
    Row("questions for tokens", f"{ROOT}.tokens.{{tenant}}", (TENANT, GATEWAY), (ADMISSION,)),
    Row("cancels", f"{ROOT}.cancel.{{tenant}}.*", (TENANT, GATEWAY), (ADMISSION, WORKER)),
    Row(
        "events of requests",
        f"{ROOT}.stream.{{tenant}}.*",
        (ADMISSION, RELEGATION, WORKER),
        (TENANT, GATEWAY),
    ),
    Row(
        "answers to clients, and events",
        f"{subjects.inbox('{tenant}')}.>",
        (ADMISSION, RELEGATION, WORKER),
        (TENANT, GATEWAY),
    ),
    # between services
    Row("heartbeats", _replica("announce"), (WORKER,), (ADMISSION, PLANNER, RELEGATION, GATEWAY)),
    Row("digests", _replica("digest"), (PLANNER,), (GATEWAY, ADMISSION, RELEGATION)),
    Row("offers", _replica("offer"), (ADMISSION, RELEGATION), (PLANNER,)),
    Row("holds", _replica("hold"), (PLANNER,), (WORKER,)),
    Row("plans", _replica("plan"), (PLANNER,), (WORKER, GATEWAY)),
    Row("resyncs", _replica("resync"), (PLANNER,), (WORKER,)),
    Row("acks", _replica("acked"), (WORKER,), (PLANNER, GATEWAY)),
    Row("who is held?", _replica("roster"), (GATEWAY,), (PLANNER,)),
    Row("which prefixes are kept?", _replica("prefixes"), (ADMISSION, RELEGATION), (PLANNER,)),
    Row("refused plans", _replica("refused"), (WORKER,), (PLANNER,)),
    Row("KV to be fetched", _replica("fetch"), (ADMISSION,), (WORKER,)),
    Row("withdrawals", _replica("withdraw"), (ADMISSION, RELEGATION), (WORKER,)),
    Row("questions for attempts", _replica("holdings"), (ADMISSION, WORKER), (WORKER,)),
    Row("ends of attempts", f"{ROOT}.over.{{replica}}", (WORKER,), (ADMISSION,)),
    Row(
        "is a process connected?",
        subjects.present(subjects.EVERY),
        (ADMISSION, PLANNER, RELEGATION, GATEWAY),
        (*SERVICES, GATEWAY),
    ),
    Row("what time is it?", subjects.TIME, (*SERVICES, GATEWAY), (ADMISSION, PLANNER)),
    Row("clocks of services", subjects.TIMES, (*SERVICES, GATEWAY), (GATEWAY,)),
    Row("relegated requests", subjects.RELEGATED, (ADMISSION,), (RELEGATION,)),
    Row("digests of the pool", subjects.POOL, (RELEGATION,), (ADMISSION, GATEWAY)),
    Row("ends of requests", subjects.ENDED, (ADMISSION, RELEGATION), (RELEGATION, GATEWAY)),
    Row("work that came", subjects.ARRIVED, (ADMISSION,), (RELEGATION,)),
    Row("replicas needed", subjects.SCALING, (RELEGATION,), (GATEWAY, PLANNER)),
    # answers between services
    Row("answers", "_ROLE.admission.>", (ADMISSION, PLANNER, WORKER), (ADMISSION,)),
    Row("answers", "_ROLE.planner.>", (ADMISSION, PLANNER, WORKER), (PLANNER,)),
    Row("answers", "_ROLE.relegation.>", (ADMISSION, RELEGATION, PLANNER, WORKER), (RELEGATION,)),
    Row("answers", "_ROLE.worker.{replica}.>", (ADMISSION, PLANNER, WORKER), (WORKER,)),
    Row("answers", "_ROLE.gateway.>", (ADMISSION, PLANNER, GATEWAY), (GATEWAY,)),
    Row("answers", "_ROLE.operator.>", SERVICES),
    # the services API
    Row("are requests let in?", "$SRV.PING.requests", (GATEWAY,)),
    *(Row("is it there? (all)", f"$SRV.{verb}", (), SERVICES) for verb in VERBS),
    Row("is it there?", "$SRV.*.{service}", (ADMISSION, PLANNER, RELEGATION), SERVICES),
    Row("is it there? (one)", "$SRV.*.{service}.*", (), SERVICES),
    # the store
    Row("records, outputs", f"$KV.{subjects.REQUESTS_BUCKET}.>", (ADMISSION, RELEGATION)),
    Row("bodies", f"$KV.{subjects.BODIES_BUCKET}.>", (ADMISSION, RELEGATION)),
    Row("usage", f"$KV.{subjects.USAGE_BUCKET}.>", (ADMISSION, RELEGATION)),
    Row("history", f"$KV.{subjects.HISTORY_BUCKET}.>", (ADMISSION, RELEGATION)),
    Row("leases of admissions", f"$KV.{subjects.LEASES_BUCKET}.admission.*", (ADMISSION,)),
    Row("leases of replicas", f"$KV.{subjects.LEASES_BUCKET}.planner.*", (PLANNER,)),
    Row("lease of relegation", f"$KV.{subjects.LEASES_BUCKET}.relegation", (RELEGATION,)),
    Row("lease of the batches", f"$KV.{subjects.LEASES_BUCKET}.batches", (GATEWAY,)),
    Row("batches", f"$KV.{subjects.BATCHES_BUCKET}.>", (GATEWAY,)),
    Row("files of batches", f"$O.{subjects.FILES_BUCKET}.>", (GATEWAY,)),
    Row("log of a replica", f"{ROOT}.acks.{{replica}}", (ADMISSION, WORKER)),
    Row("read a record", f"{DIRECT}.{REQUESTS}.>", (ADMISSION, RELEGATION, WORKER)),
    Row("read a body", f"{DIRECT}.{BODIES}.>", (ADMISSION, WORKER)),
    Row("read a sum", f"{DIRECT}.{USAGE}.>", (ADMISSION, RELEGATION)),
    Row("list history", f"{DIRECT}.{HISTORY}", (ADMISSION,)),
    Row("list records", f"{DIRECT}.{REQUESTS}", (ADMISSION, RELEGATION, WORKER)),
    Row(
        "read the lease of an admission",
        f"{DIRECT}.{LEASES}.$KV.{subjects.LEASES_BUCKET}.admission.*",
        (ADMISSION,),
    ),
    Row(
        "read the lease of a replica",
        f"{DIRECT}.{LEASES}.$KV.{subjects.LEASES_BUCKET}.planner.{{replica}}",
        (PLANNER, WORKER),
    ),
    Row(
        "read the lease of relegation",
        f"{DIRECT}.{LEASES}.$KV.{subjects.LEASES_BUCKET}.relegation",
        (RELEGATION,),
    ),
    Row(
        "read the lease of the batches",
        f"{DIRECT}.{LEASES}.$KV.{subjects.LEASES_BUCKET}.batches",
        (GATEWAY,),
    ),
    Row("list leases", f"{DIRECT}.{LEASES}", (ADMISSION,)),
    Row("read a batch", f"{DIRECT}.{BATCHES}.>", (GATEWAY,)),
    Row("list batches", f"{DIRECT}.{BATCHES}", (GATEWAY,)),
    Row("read the end of a file", f"{DIRECT}.{FILES}.>", (GATEWAY,)),
    Row("read a file", f"{DIRECT}.{FILES}", (GATEWAY,)),
    Row("read the end of a log", f"{DIRECT}.{{log}}.{ROOT}.acks.{{replica}}", (WORKER,)),
    Row("read a log", f"{DIRECT}.{{log}}", (ADMISSION, WORKER)),
    Row("delete an output", f"{PURGE}.{REQUESTS}", (ADMISSION, RELEGATION)),
    Row("delete a body", f"{PURGE}.{BODIES}", (ADMISSION, RELEGATION)),
    Row("delete a batch", f"{PURGE}.{BATCHES}", (GATEWAY,)),
    Row("delete a file", f"{PURGE}.{FILES}", (GATEWAY,)),
    Row("trim a log", f"{PURGE}.{{log}}", (WORKER,)),
    Row("is the bucket there?", f"{INFO}.{REQUESTS}", (ADMISSION, RELEGATION, WORKER)),
    Row("is the bucket there?", f"{INFO}.{BODIES}", (ADMISSION, RELEGATION, WORKER)),
    Row("is the bucket there?", f"{INFO}.{USAGE}", (ADMISSION, RELEGATION)),
    Row("is the bucket there?", f"{INFO}.{HISTORY}", (ADMISSION, RELEGATION)),
    Row("is the bucket there?", f"{INFO}.{LEASES}", (*SERVICES, GATEWAY)),
    Row("is the bucket there?", f"{INFO}.{BATCHES}", (GATEWAY,)),
    Row("is the bucket there?", f"{INFO}.{FILES}", (GATEWAY,)),
    Row("is the log there?", f"{INFO}.{{log}}", (WORKER,)),
)


def bound(subject: str, user: User) -> list[str]:
    """The subjects that a row's `subject` stands for with this user, with NATS wildcards."""
    every = subjects.EVERY
    text = (
        subject.replace("{tenant}", user.name if user.role is TENANT else every)
        .replace("{replica}", user.name if user.role is WORKER else every)
        .replace("{log}", subjects.log_stream(user.name) if user.role is WORKER else every)
    )
    if "{service}" not in text:
        return [text]
    return [text.replace("{service}", name) for name in SERVES.get(user.role, ())]


@functools.lru_cache(maxsize=4096)
def publishes(user: User) -> tuple[str, ...]:
    """The subjects on which the user may publish."""
    if user.role is Role.OPERATOR:
        return (">",)
    return tuple(s for row in TABLE if user.role in row.publish for s in bound(row.subject, user))


@functools.lru_cache(maxsize=4096)
def subscribes(user: User) -> tuple[str, ...]:
    """The subjects to which the user may subscribe."""
    if user.role is Role.OPERATOR:
        return (">",)
    return tuple(s for row in TABLE if user.role in row.subscribe for s in bound(row.subject, user))


def may_publish(user: User, subject: str) -> bool:
    tokens = subject.split(".")
    return any(matches(pattern.split("."), tokens) for pattern in publishes(user))


def may_answer(subject: str, inbox: str) -> bool:
    """True if a message that came on `subject` may be answered at `inbox`: its tenant's, or that of
    a user who may publish there. The asker names the inbox, and the answer has our permissions:
    elsewhere it could be a forged message, or a record of the store.
    """
    asker, tenant = owner_of(inbox), subjects.tenant_in(subject)
    if asker is None or tenant is not None:
        return asker == User(TENANT, tenant or "")
    return _may_ask(asker, subject)


_may_ask = functools.lru_cache(maxsize=4096)(may_publish)
