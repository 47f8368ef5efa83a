"""Every NATS subject. The version is part of the subject; callers check ids with `check_id`."""

import re

from shared.errors import PeerError
from shared.vocabulary import ReplicaId, RequestKey

ROOT = "slo.v1"
ID_PATTERN = re.compile(r"[A-Za-z0-9_-]{1,64}")
INBOX_PATTERN = re.compile(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){1,4}")

# client -> admission (queue group)
REQUESTS = f"{ROOT}.requests.*"
ATTACH = f"{ROOT}.attach"
# client -> admissions (queue group) and workers
CANCELS = f"{ROOT}.cancel.*.*"
# worker -> admission (queue group)
OVER = f"{ROOT}.over"
# planner -> all, worker -> all
DIGESTS = f"{ROOT}.replica.*.digest"
ANNOUNCEMENTS = f"{ROOT}.replica.*.announce"
# admission -> relegation
RELEGATED = f"{ROOT}.relegated"
# JetStream
ACKS_STREAM = "acks"
REQUESTS_BUCKET = "requests"
LEASES_BUCKET = "leases"


def check_id(value: str, param: str) -> str:
    """Return the id. Raises PeerError unless it is 1 to 64 of A-Z a-z 0-9 _ -, so that it never has
    a dot or a wildcard.
    """
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


def requests(tier: str) -> str:
    return f"{ROOT}.requests.{tier}"


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


def withdraw(replica: ReplicaId) -> str:
    """Admission -> worker: release this attempt and send its output."""
    return f"{ROOT}.replica.{replica}.withdraw"


def holdings(replica: ReplicaId) -> str:
    """Admission -> worker: which of these attempts do you know?"""
    return f"{ROOT}.replica.{replica}.holdings"


def digest(replica: ReplicaId) -> str:
    return f"{ROOT}.replica.{replica}.digest"


def announce(replica: ReplicaId) -> str:
    return f"{ROOT}.replica.{replica}.announce"


def ack_log(replica: ReplicaId) -> str:
    """The replica's subject in the `acks` stream."""
    return f"{ROOT}.acks.{replica}"
