"""Makes the streams and buckets (for the operator), and checks what services need of NATS."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StorageType, StoreCompression, StreamConfig

from shared import subjects
from shared.bus.api import LEASE_TTL_S
from shared.bus.permissions import HISTORY, INFO, publishes
from shared.bus.users import OPERATOR, Role, User
from shared.errors import BusTimeout, ConfigError
from shared.subjects import check_id
from shared.vocabulary import ReplicaId

MIN_VERSION = (2, 11)  # the first version with per-message TTL; older ones ignore it silently
# a prompt of 1 M tokens is 4 MB, and travels once more where its request resumes
MIN_PAYLOAD_BYTES = 8 * 1024 * 1024
# The bodies of open requests: 130,000 with a prompt of 4,000 tokens. Where this bucket is full,
# requests are refused. Accepted requests need only room for records and outputs, which nobody can
# fill with prompts: 500,000 records of 2 KB, or 250 outputs with the most log-probabilities.
BODIES_BYTES = 2 * 1024 * 1024 * 1024
REQUESTS_BYTES = 1024 * 1024 * 1024
LEASES_BYTES = 64 * 1024 * 1024  # a lease is 200 bytes
BATCHES_BYTES = 64 * 1024 * 1024  # a record is 1 to 4 KB, so 16,000 batches
# Files and results of batches, kept for a month: 500,000 lines of 2 KB, answers as long.
FILES_BYTES = 2 * 1024 * 1024 * 1024
# A sum of a tenant's day is 0.3 KB and stays for 400 days: of 500 tenants.
USAGE_BYTES = 64 * 1024 * 1024
# An ended request is 1.5 KB here, 0.35 KB on the disk and 0.7 KB in the server's memory, for its
# subject: 700,000, a day of 8 a second. Where there are more, the oldest leave earlier.
HISTORY_BYTES = 1024 * 1024 * 1024
HISTORY_S = 86_400.0  # the operator may change it
# 50 iterations/s of 2 KB are 100 KB/s, so this is 20 minutes of log; its worker trims it every few
# seconds, except for entries that a request from before the worker's last start still needs.
LOG_BYTES = 128 * 1024 * 1024
COPIES = 1  # of a new stream, where the operator names no number
ALREADY_EXISTS = 10058
NO_SPACE = 10047
_TRIES = 5
_RETRY_S = 0.2
# The settings our code relies on. The operator may change replicas, placement, compression and
# sizes, and how long the history stays, but not leave a stream without a size: it would take all of
# the disk.
_RELIED_ON = (
    "subjects",
    "storage",
    "max_msgs_per_subject",
    "max_age",
    "allow_direct",
    "allow_msg_ttl",
    "allow_rollup_hdrs",
    "discard",
)
# Those that a release may change: `slackline streams` brings the streams of an earlier one to it.
_CHANGED = ("max_msgs_per_subject", "max_age", "allow_direct", "allow_rollup_hdrs", "discard")


def check_server(client: Client) -> None:
    """Raises a ConfigError that names everything missing, and what to write where."""
    version = client.connected_server_version
    missing = []
    if (version.major, version.minor) < MIN_VERSION:
        missing.append(
            f"nats-server is {version.major}.{version.minor}.{version.patch}: "
            "install 2.11 or later (per-message TTL)"
        )
    if client.max_payload < MIN_PAYLOAD_BYTES:
        missing.append(
            f"max_payload is {client.max_payload} bytes: put `max_payload: 8MB` in nats-server.conf"
        )
    if missing:
        raise ConfigError("the NATS server lacks what Slackline needs: " + "; ".join(missing))


def bucket_configs(copies: int) -> list[StreamConfig]:
    """The streams of the buckets: KV_<name> of keys, OBJ_<name> of objects. Only leases have a
    limit of messages per subject; other keys keep one value (StreamKeyValue).
    """

    def bucket(
        name: str, max_bytes: int, max_age_s: float = 0.0, *, objects: bool = False
    ) -> StreamConfig:
        rolled_up = name != subjects.LEASES_BUCKET
        kind, root = ("OBJ", "$O") if objects else ("KV", "$KV")
        return StreamConfig(
            name=f"{kind}_{name}",
            subjects=[f"{root}.{name}.>"],
            storage=StorageType.FILE,
            num_replicas=copies,
            max_msgs_per_subject=-1 if rolled_up else 1,
            max_age=max_age_s,
            max_bytes=max_bytes,
            allow_rollup_hdrs=rolled_up,
            discard=DiscardPolicy.NEW,
            allow_direct=True,
            allow_msg_ttl=True,
        )

    return [
        bucket(subjects.REQUESTS_BUCKET, REQUESTS_BYTES),
        bucket(subjects.BODIES_BUCKET, BODIES_BYTES),
        bucket(subjects.LEASES_BUCKET, LEASES_BYTES, LEASE_TTL_S),
        bucket(subjects.BATCHES_BUCKET, BATCHES_BYTES),
        bucket(subjects.USAGE_BUCKET, USAGE_BYTES),
        bucket(subjects.FILES_BUCKET, FILES_BYTES, objects=True),
        replace(
            bucket(subjects.HISTORY_BUCKET, HISTORY_BYTES, HISTORY_S),
            discard=DiscardPolicy.OLD,
            compression=StoreCompression.S2,
        ),
    ]


def log_config(replica: str, copies: int) -> StreamConfig:
    return StreamConfig(
        name=subjects.log_stream(replica),
        subjects=[subjects.ack_log(ReplicaId(replica))],
        storage=StorageType.FILE,
        num_replicas=copies,
        max_msgs_per_subject=-1,
        max_age=0.0,
        max_bytes=LOG_BYTES,
        max_msg_size=MIN_PAYLOAD_BYTES,
        discard=DiscardPolicy.NEW,
        allow_direct=True,
        allow_msg_ttl=False,
    )


async def make_streams(
    client: Client, replicas: Iterable[str], copies: int | None, timeout_s: float
) -> list[str]:
    """Make missing streams, and bring those of an earlier release to this one. `copies`: of each;
    None: COPIES of new ones, and the others keep theirs.

    Returns a sentence for each stream that was changed, or that has messages although it was just
    made: nats-server had lost it by a broken meta.inf. Raises ConfigError where one is not ours or
    cannot be made, BusTimeout.
    """
    made = COPIES if copies is None else copies
    logs = [log_config(check_id(replica, "replica"), made) for replica in replicas]
    told = []
    for config in (*bucket_configs(made), *logs):
        told += await _change(client, config, copies, timeout_s)
        if messages := await _make(client, config, timeout_s):
            told.append(
                f"nats-server could not read the meta.inf of the stream {config.name}: made again, "
                f"it has its {messages} messages"
            )
    return told


async def _change(
    client: Client, wanted: StreamConfig, copies: int | None, timeout_s: float
) -> list[str]:
    """Give a stream that is there the settings of this release, and so many copies. Sizes and all
    else that is the operator's stay. Returns what was changed, in words.
    """
    stream = client.jetstream(timeout=timeout_s)
    assert wanted.name is not None
    try:
        present = (await stream.stream_info(wanted.name)).config
    except (nats.js.errors.Error, nats.errors.TimeoutError):
        return []  # `_make` makes it, or says why it cannot
    names = [name for name in _CHANGED if (wanted.name, name) != (HISTORY, "max_age")]
    if copies is not None:
        names.append("num_replicas")
    changes = {
        name: getattr(wanted, name)
        for name in names
        if (getattr(present, name) or None) != (getattr(wanted, name) or None)
    }
    if not changes or (present.subjects, present.storage) != (wanted.subjects, wanted.storage):
        return []
    try:
        await stream.update_stream(replace(present, **changes))
    except nats.js.errors.APIError as error:
        raise ConfigError(f"cannot change the stream {wanted.name}: {error}") from error
    return [
        f"the stream {wanted.name} has now {name} {value} (before: {getattr(present, name)})"
        for name, value in changes.items()
    ]


async def check_streams(client: Client, user: User, timeout_s: float) -> None:
    """Check the streams that the user may ask about. Raises ConfigError if one is amiss."""
    for config in streams_of(user):
        if not await _is_there(client, config, timeout_s):
            raise ConfigError(
                f"the stream {config.name} is not there: make it with `slackline streams` and the "
                "key of the operator. If it was there before, nats-server could not read its "
                "meta.inf, as its log says; made again, it has its messages"
            )


def streams_of(user: User) -> list[StreamConfig]:
    """The streams that the user may ask about; none for the operator, who makes them."""
    logs = [log_config(user.name, 1)] if user.role is Role.WORKER else []
    asked = publishes(user) if user != OPERATOR else ()
    return [config for config in (*bucket_configs(1), *logs) if f"{INFO}.{config.name}" in asked]


async def _make(client: Client, config: StreamConfig, timeout_s: float) -> int:
    """Make the stream unless it exists; return how many messages a new one already has."""
    for attempt in range(_TRIES):
        if await _is_there(client, config, timeout_s):
            return 0
        try:
            made = await client.jetstream(timeout=timeout_s).add_stream(config)
            return made.state.messages
        except nats.js.errors.APIError as error:
            if error.err_code == NO_SPACE:
                raise ConfigError(
                    f"no room for the stream {config.name}: "
                    f"raise max_file_store in nats-server.conf ({error})"
                ) from error
            # another operator makes it at the same time
            if error.err_code != ALREADY_EXISTS and not isinstance(
                error, nats.js.errors.ServiceUnavailableError
            ):
                raise ConfigError(f"cannot make the stream {config.name}: {error}") from error
        except nats.errors.TimeoutError:
            await asyncio.sleep(_RETRY_S * attempt)
    raise BusTimeout(f"JetStream did not make the stream {config.name} in {_TRIES} tries")


async def _is_there(client: Client, config: StreamConfig, timeout_s: float) -> bool:
    """Tells whether the stream exists. Raises ConfigError for other settings, or no answer."""
    assert config.name is not None
    for attempt in range(_TRIES):
        try:
            info = await client.jetstream(timeout=timeout_s).stream_info(config.name)
        except nats.js.errors.NotFoundError:
            return False
        except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
            await asyncio.sleep(_RETRY_S * attempt)  # a cluster has no leader yet
        except nats.errors.Error as error:
            raise ConfigError(f"cannot ask about the stream {config.name}: {error}") from error
        else:
            _check(config, info.config)
            return True
    raise ConfigError(
        f"JetStream did not answer about the stream {config.name}: is it enabled "
        "(`jetstream: { store_dir: /data/jetstream }` in nats-server.conf), is its cluster whole, "
        "and may this user ask?"
    )


def _check(wanted: StreamConfig, present: StreamConfig) -> None:
    differing = [
        f"{name} is {getattr(present, name)} and must be {getattr(wanted, name)}"
        for name in _RELIED_ON
        if (getattr(present, name) or None) != (getattr(wanted, name) or None)
        and (wanted.name, name) != (HISTORY, "max_age")
    ]
    if differing:
        raise ConfigError(
            f"the stream {wanted.name} was made by something else: {'; '.join(differing)}; "
            "rename or delete it"
        )
    if (present.max_bytes or -1) < 0:
        raise ConfigError(
            f"the stream {wanted.name} has no max_bytes and could fill the disk: "
            f"`nats stream edit {wanted.name} --max-bytes={wanted.max_bytes}`"
        )
