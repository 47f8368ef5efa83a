"""All NATS subjects, and the names of buckets, streams and leases. The version is part of the
subject; callers check ids with `check_id`.
"""

import re

from shared.errors import PeerError
from shared.vocabulary import ReplicaId, RequestKey

ROOT = "slo.v1"
ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
DEFAULT_TENANT = "default"
INBOX_TOKENS = 4  # after the tenant's prefix
EVERY = "*"  # in place of a tenant, a tier or a replica: all of them

# client -> admission (queue group)
REQUESTS = f"{ROOT}.requests.*.*"
ATTACHES = f"{ROOT}.attach.*"
EXPLAINS = f"{ROOT}.explain.*"
HISTORIES = f"{ROOT}.history.*"
TOKENS = f"{ROOT}.tokens.*"
# operator -> admission (queue group): as for a tenant, with the names of all tenants
EXPLAIN_ALL = f"{ROOT}.explain"
HISTORY_ALL = f"{ROOT}.history"
# client -> admissions (queue group) and workers
CANCELS = f"{ROOT}.cancel.*.*"
# admission, worker, relegation -> client
STREAMS = f"{ROOT}.stream.*.*"
# worker -> admission (queue group)
OVERS = f"{ROOT}.over.*"
# planner -> all, worker -> all
DIGESTS = f"{ROOT}.replica.*.digest"
ANNOUNCEMENTS = f"{ROOT}.replica.*.announce"
# service -> admissions and planners (queue group): what time is it?
TIME = f"{ROOT}.time"
# service -> gateways: its time, and how far the clock of its host is off
TIMES = f"{ROOT}.times"
# admission -> relegation
RELEGATED = f"{ROOT}.relegated"
# admission -> relegation: the work that came
ARRIVED = f"{ROOT}.arrived"
# relegation -> whoever starts replicas, the console
SCALING = f"{ROOT}.scaling"
# relegation -> admissions
POOL = f"{ROOT}.pool"
# planner -> worker, worker -> planner; the console hears these of all replicas
PLANS = f"{ROOT}.replica.*.plan"
ACKS = f"{ROOT}.replica.*.acked"
# admission, relegation -> the console, and others that watch the fleet
ENDED = f"{ROOT}.ended"
# the subjects whose next token is a tenant
_TENANTS = frozenset(("requests", "attach", "explain", "history", "tokens", "cancel", "stream"))
# JetStream
REQUESTS_BUCKET = "requests"
BODIES_BUCKET = "bodies"
LEASES_BUCKET = "leases"
BATCHES_BUCKET = "batches"
FILES_BUCKET = "files"  # of objects
USAGE_BUCKET = "usage"
HISTORY_BUCKET = "history"


def check_id(value: str, param: str) -> str:
    """The id. Raises PeerError unless it is 1 to 64 of A-Z a-z 0-9 _ - (no dot, no wildcard)."""
    if not ID_PATTERN.fullmatch(value):
        raise PeerError(
            f"{param} must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -",
            param=param,
            code="invalid_id",
        )
    return value


def request_key(tenant: str, request_id: str) -> RequestKey:
    """The key of a request. Raises PeerError unless both are valid ids."""
    return RequestKey(f"{check_id(tenant, 'tenant')}.{check_id(request_id, 'request_id')}")


def requests(tenant: str, tier: str) -> str:
    return f"{ROOT}.requests.{tenant}.{tier}"


def attach(tenant: str) -> str:
    return f"{ROOT}.attach.{tenant}"


def explain(tenant: str) -> str:
    return f"{ROOT}.explain.{tenant}"


def history(tenant: str) -> str:
    """Client -> admission (queue group): which requests of a trace or a minute have ended?"""
    return f"{ROOT}.history.{tenant}"


def tokens(tenant: str) -> str:
    """Client -> admission (queue group): what are this text's tokens, or these tokens' text?"""
    return f"{ROOT}.tokens.{tenant}"


def tenant_in(subject: str) -> str | None:
    """The tenant that a client's subject belongs to; None for any other subject."""
    tokens = subject.split(".")
    of_a_tenant = len(tokens) > 3 and f"{tokens[0]}.{tokens[1]}" == ROOT and tokens[2] in _TENANTS
    return tokens[3] if of_a_tenant else None


def tenant_of(subject: str, named: str) -> str:
    """The subject's tenant. Raises PeerError if the message names another; "" names none."""
    tenant = check_id(tenant_in(subject) or "", "tenant")
    if named not in ("", tenant):
        raise PeerError(f"the subject is that of the tenant {tenant}", param="tenant")
    return tenant


def replica_in(subject: str) -> str | None:
    """The replica that the subject belongs to; None for any other subject."""
    match subject.split("."):
        case ["slo", "v1", "replica", replica, _] | ["slo", "v1", "over" | "acks", replica]:
            return replica
    return None


def inbox(tenant: str) -> str:
    """The prefix of a tenant's inboxes: only there is the tenant answered."""
    return f"_INBOX.{tenant}"


def check_inbox(value: str, tenant: str) -> str:
    """Return the inbox. Raises PeerError unless it is a subject under the tenant's prefix."""
    tokens = value.removeprefix(f"{inbox(tenant)}.").split(".")
    if not value.startswith(f"{inbox(tenant)}.") or len(tokens) > INBOX_TOKENS:
        raise PeerError(f"inbox must be a subject under {inbox(tenant)}.", param="inbox")
    for token in tokens:
        check_id(token, "inbox")
    return value


def stream(key: RequestKey) -> str:
    """The subject of a request's events, unless the client gave an inbox of its own."""
    return f"{ROOT}.stream.{key}"


def cancel(key: RequestKey) -> str:
    return f"{ROOT}.cancel.{key}"


def planner_lease(replica: ReplicaId) -> str:
    """The key of the lease on planning a replica."""
    return f"planner.{replica}"


def offer(replica: ReplicaId) -> str:
    """Admission or relegation -> planner that leases the replica: can you hold this request?"""
    return f"{ROOT}.replica.{replica}.offer"


def hold(replica: ReplicaId) -> str:
    """Planner -> worker: take this request in."""
    return f"{ROOT}.replica.{replica}.hold"


def plan(replica: ReplicaId) -> str:
    """Planner -> worker: run this iteration next."""
    return f"{ROOT}.replica.{replica}.plan"


def plan_refused(replica: ReplicaId) -> str:
    """Worker -> planner: this plan cannot be run; resync."""
    return f"{ROOT}.replica.{replica}.refused"


def acked(replica: ReplicaId) -> str:
    """Worker -> planner: an ack, after it is in the log."""
    return f"{ROOT}.replica.{replica}.acked"


def resync(replica: ReplicaId) -> str:
    """Planner -> worker: send all that you hold."""
    return f"{ROOT}.replica.{replica}.resync"


def fetch(replica: ReplicaId) -> str:
    """Admission -> worker: KV may be fetched."""
    return f"{ROOT}.replica.{replica}.fetch"


def withdraw(replica: ReplicaId) -> str:
    """Admission -> worker: release this attempt and send its output."""
    return f"{ROOT}.replica.{replica}.withdraw"


def holdings(replica: ReplicaId) -> str:
    """Admission -> worker: which of these attempts do you know?"""
    return f"{ROOT}.replica.{replica}.holdings"


def roster(replica: ReplicaId) -> str:
    """Gateway -> planner that leases the replica: which requests does it hold?"""
    return f"{ROOT}.replica.{replica}.roster"


def prefixes(replica: ReplicaId) -> str:
    """Admission, relegation -> planner that leases the replica: which prefixes does it keep?"""
    return f"{ROOT}.replica.{replica}.prefixes"


def digest(replica: ReplicaId) -> str:
    return f"{ROOT}.replica.{replica}.digest"


def announce(replica: ReplicaId) -> str:
    return f"{ROOT}.replica.{replica}.announce"


def over(replica: ReplicaId) -> str:
    """Worker -> admission: an attempt of this replica is over."""
    return f"{ROOT}.over.{replica}"


def present(name: str) -> str:
    """Service -> the process of this name: are you connected?"""
    return f"{ROOT}.present.{name}"


def log_stream(replica: str) -> str:
    """The stream of the replica's log."""
    return f"acks-{replica}"


def ack_log(replica: ReplicaId) -> str:
    """The only subject of the replica's log."""
    return f"{ROOT}.acks.{replica}"
