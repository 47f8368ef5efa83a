"""The needs of the services at a NATS server, checked at connect; and the stream and buckets, which
the first service creates.
"""

import asyncio

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from shared import subjects
from shared.bus.api import LEASE_TTL_S
from shared.errors import BusTimeout, ConfigError
from shared.vocabulary import ReplicaId

MIN_VERSION = (2, 11)  # the first version with per-message TTL; older ones ignore it silently
# a prompt of 1 M tokens is 4 MB, and travels once more where its request resumes
MIN_PAYLOAD_BYTES = 8 * 1024 * 1024
# 50 iterations/s of 2 KB from 100 replicas are 10 MB/s, so this is 100 s of log; workers have it
# trimmed every few seconds.
ACKS_BYTES = 1024 * 1024 * 1024
ALREADY_EXISTS = 10058
NO_SPACE = 10047
_TRIES = 5
_RETRY_S = 0.2
# The settings our code relies on. The operator may change replicas, placement and compression.
_RELIED_ON = (
    "subjects",
    "storage",
    "max_msgs_per_subject",
    "max_age",
    "allow_direct",
    "allow_msg_ttl",
    "discard",
)


async def check_server(client: Client, timeout_s: float) -> None:
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
    try:
        await client.jetstream(timeout=timeout_s).account_info()
    except nats.errors.TimeoutError:
        missing.append(f"JetStream did not answer within {timeout_s:g} s: is its cluster whole?")
    except nats.errors.Error as error:
        missing.append(
            "JetStream is not enabled: put `jetstream: { store_dir: /data/jetstream }` "
            f"in nats-server.conf ({error})"
        )
    if missing:
        raise ConfigError("the NATS server lacks what Slackline needs: " + "; ".join(missing))


def stream_configs(replicas: int) -> list[StreamConfig]:
    """The streams of the log and of the two buckets. A bucket is a stream KV_<name> that keeps one
    message per subject.
    """

    def bucket(name: str, max_age_s: float) -> StreamConfig:
        return StreamConfig(
            name=f"KV_{name}",
            subjects=[f"$KV.{name}.>"],
            storage=StorageType.FILE,
            num_replicas=replicas,
            max_msgs_per_subject=1,
            max_age=max_age_s,
            discard=DiscardPolicy.NEW,
            allow_direct=True,
            allow_msg_ttl=True,
            allow_rollup_hdrs=True,  # for `nats kv purge`
        )

    acks = StreamConfig(
        name=subjects.ACKS_STREAM,
        subjects=[subjects.ack_log(ReplicaId("*"))],
        storage=StorageType.FILE,
        num_replicas=replicas,
        max_msgs_per_subject=-1,
        max_age=0.0,
        max_bytes=ACKS_BYTES,
        max_msg_size=MIN_PAYLOAD_BYTES,
        discard=DiscardPolicy.NEW,
        allow_direct=True,
        allow_msg_ttl=False,
    )
    return [
        bucket(subjects.REQUESTS_BUCKET, 0.0),
        bucket(subjects.LEASES_BUCKET, LEASE_TTL_S),
        acks,
    ]


async def ensure_streams(client: Client, replicas: int, timeout_s: float) -> None:
    """Create the streams that are absent and check those that exist. Raises ConfigError where one
    differs, BusTimeout where the server does not answer.
    """
    for config in stream_configs(replicas):
        await _ensure(client, config, timeout_s)


async def _ensure(client: Client, config: StreamConfig, timeout_s: float) -> None:
    jetstream = client.jetstream(timeout=timeout_s)
    assert config.name is not None
    # other services create it at the same time, or a cluster has no leader yet
    for attempt in range(_TRIES):
        try:
            _check(config, (await jetstream.stream_info(config.name)).config)
            return
        except nats.js.errors.NotFoundError:
            pass
        except (nats.errors.TimeoutError, nats.js.errors.ServiceUnavailableError):
            await asyncio.sleep(_RETRY_S * attempt)
            continue
        try:
            await jetstream.add_stream(config)
            return
        except nats.js.errors.APIError as error:
            if error.err_code == NO_SPACE:
                raise ConfigError(
                    f"no room for the stream {config.name}: "
                    f"raise max_file_store in nats-server.conf ({error})"
                ) from error
            if error.err_code != ALREADY_EXISTS and not isinstance(
                error, nats.js.errors.ServiceUnavailableError
            ):
                raise ConfigError(f"cannot create the stream {config.name}: {error}") from error
        except nats.errors.TimeoutError:
            await asyncio.sleep(_RETRY_S * attempt)
    raise BusTimeout(f"JetStream did not make the stream {config.name} in {_TRIES} tries")


def _check(wanted: StreamConfig, present: StreamConfig) -> None:
    differing = [
        f"{name} is {getattr(present, name)} and must be {getattr(wanted, name)}"
        for name in _RELIED_ON
        if (getattr(present, name) or None) != (getattr(wanted, name) or None)
    ]
    if differing:
        raise ConfigError(
            f"the stream {wanted.name} was made by something else: {'; '.join(differing)}; "
            "rename or delete it"
        )
