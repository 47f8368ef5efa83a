"""Buckets and the log over JetStream's own protocol: KeyValue and Log of shared/bus/api.py.

nats-py's KeyValue has no TTL on update and reads through a consumer. Here a write is one request
with an expected sequence, a read one direct get, a listing a few batches of direct gets (5,000 keys
of 1 KB in 0.13-0.21 s). A stream replica that is behind may answer. An old answer does no harm: its
reader then writes by compare-and-set, or waits for a newer one.
"""

import datetime as dt
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg

from shared.bus.api import Entry
from shared.bus.inbox import ReplyInbox, status
from shared.errors import (
    UNDECODABLE,
    BusError,
    BusTimeout,
    NoResponders,
    PeerError,
    StoreFull,
    WrongSequence,
)

# JetStream's "wrong last sequence", with and without the number
WRONG_SEQUENCE_CODES = (10071, 10164)
# the stream is at its max_bytes; the server is at its max_file_store
FULL_CODES = (10077, 10023, 10047)
MARKER_TTL_S = 5  # of a deleted lease
BATCH_MSGS = 1_000  # messages of one direct get: under a sixteenth of the inbox's queue
BATCH_BYTES = 8 * 1024 * 1024
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SEQUENCE_AT_END = re.compile(r"(\d+)$")


class ApiError(msgspec.Struct, frozen=True):
    err_code: int = 0
    description: str = ""


class State(msgspec.Struct, frozen=True):
    subjects: dict[str, int] = {}
    bytes: int = 0


class Settings(msgspec.Struct, frozen=True):
    max_bytes: int = 0


class Ack(msgspec.Struct, frozen=True):
    """JetStream's answer to a write, and the parts read of its answer to an API call."""

    seq: int = 0
    error: ApiError | None = None
    state: State = State()
    config: Settings = Settings()
    total: int = 0  # number of subjects, of which `state` may have only a page
    ts: dt.datetime | None = None  # when it was answered, by the leader's clock


_acks = msgspec.json.Decoder(Ack)


class StreamSize(NamedTuple):
    """The size of a stream, beside the most that it holds."""

    size_bytes: int
    limit_bytes: int


class Stream:
    """One stream, with writes that expect a sequence, direct gets and purges."""

    def __init__(self, inbox: ReplyInbox, name: str, timeout_s: float) -> None:
        self._inbox = inbox
        self._name = name
        self._timeout_s = timeout_s

    async def write(
        self,
        subject: str,
        payload: bytes,
        headers: dict[str, str],
        expected_last: int | None = None,
    ) -> int:
        """Write and return the sequence. Raises WrongSequence, BusTimeout, BusError."""
        if expected_last is not None:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(expected_last)
        return (await self._call(subject, payload, headers)).seq

    async def last(self, subject: str) -> Msg | None:
        return await self._get(f"$JS.API.DIRECT.GET.{self._name}.{subject}")

    async def since(self, filter_subject: str, seq: int) -> AsyncIterator[list[Msg]]:
        """Batches of the messages that match, from `seq` on. Raises BusTimeout if one breaks."""
        more = True
        while more:
            question = {
                "seq": seq,
                "next_by_subj": filter_subject,
                "batch": BATCH_MSGS,
                "max_bytes": BATCH_BYTES,
            }
            *msgs, end = await self._ask_batch(msgspec.json.encode(question))
            if not msgs:
                return
            _check_unbroken(msgs, end)
            yield msgs
            seq = sequence(msgs[-1]) + 1
            more = (end.headers or {}).get("Nats-Num-Pending") != "0"

    async def purge(self, subject: str, below: int | None = None) -> None:
        """Remove the messages of the subject, or those with a sequence under `below`."""
        which: dict[str, str | int] = {"filter": subject}
        if below is not None:
            which["seq"] = below
        await self._call(f"$JS.API.STREAM.PURGE.{self._name}", msgspec.json.encode(which), None)

    async def subjects(self) -> list[str]:
        """The subjects that have a message."""
        found: list[str] = []
        while True:
            question = {"subjects_filter": ">", "offset": len(found)}
            answer = await self._call(
                f"$JS.API.STREAM.INFO.{self._name}", msgspec.json.encode(question), None
            )
            found += answer.state.subjects
            if not answer.state.subjects or len(found) >= answer.total:
                return found

    async def size(self) -> StreamSize:
        answer = await self._call(f"$JS.API.STREAM.INFO.{self._name}", b"", None)
        return StreamSize(answer.state.bytes, answer.config.max_bytes)

    async def leader_unix_s(self) -> float:
        """The wall clock of the server that leads the stream."""
        answer = await self._call(f"$JS.API.STREAM.INFO.{self._name}", b"", None)
        if answer.ts is None:
            raise BusError(f"the stream {self._name} does not tell the time")
        return answer.ts.timestamp()

    async def _call(self, subject: str, payload: bytes, headers: dict[str, str] | None) -> Ack:
        try:
            msg = await self._inbox.ask(
                subject, payload, headers=headers, timeout_s=self._timeout_s
            )
        except NoResponders as error:
            raise self._unanswered() from error
        try:
            ack = _acks.decode(msg.data)
        except UNDECODABLE as error:
            raise BusError(f"the stream {self._name} answered something else: {error}") from error
        if ack.error is None:
            return ack
        if ack.error.err_code in WRONG_SEQUENCE_CODES:
            found = _SEQUENCE_AT_END.search(ack.error.description)
            raise WrongSequence(
                f"{subject}: {ack.error.description}", int(found[1]) if found else None
            )
        kind = StoreFull if ack.error.err_code in FULL_CODES else BusError
        raise kind(f"{subject}: {ack.error.description} ({ack.error.err_code})")

    async def _get(self, subject: str) -> Msg | None:
        try:
            msg = await self._inbox.ask(subject, b"", timeout_s=self._timeout_s)
        except NoResponders as error:
            raise self._unanswered() from error
        return None if self._is_end(msg) else msg

    async def _ask_batch(self, question: bytes) -> list[Msg]:
        msgs = await self._inbox.ask_many(
            f"$JS.API.DIRECT.GET.{self._name}", question, timeout_s=self._timeout_s
        )
        self._is_end(msgs[-1])
        return msgs

    def _unanswered(self) -> BusTimeout:
        return BusTimeout(
            f"the stream {self._name} does not answer: it has no leader now, or it is not there "
            "(`slackline streams` makes it)"
        )

    def _is_end(self, msg: Msg) -> bool:
        """True if there is no message (404) or no further one (204). Raises for other statuses."""
        code = status(msg)
        if code == "503":
            raise self._unanswered()
        if code not in ("", "204", "404"):
            raise BusError(
                f"the stream {self._name} answered {code} "
                f"{(msg.headers or {}).get('Description', '')}"
            )
        return code != ""


class StreamKeyValue:
    """A bucket whose replaced and deleted values do not come back after a crash of the server.

    Where a limit of messages per subject removes one, nats-server notes nothing on disk (its issue
    8505). Killed, it brings a key's older values back, such as an open record that ended. So these
    streams have no such limit: a write rolls up what it replaces, and a delete purges.
    """

    def __init__(self, stream: Stream, bucket: str) -> None:
        self._stream = stream
        self._prefix = f"$KV.{bucket}."

    async def get(self, key: str) -> Entry | None:
        msg = await self._stream.last(self._subject(key))
        return None if msg is None or _is_marker(msg) else Entry(msg.data, sequence(msg))

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        subject = self._subject(key)
        try:
            return await self._stream.write(subject, value, ttl_headers(ttl_s), 0)
        except WrongSequence:
            present = await self._stream.last(subject)
            if present is not None and not _is_marker(present):
                raise
        # Deleted: the new value follows the marker, or nothing where that has just expired.
        return await self._replace(key, value, 0 if present is None else sequence(present), ttl_s)

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        return await self._replace(key, value, revision, ttl_s)

    async def delete(self, key: str) -> None:
        await self._stream.purge(self._subject(key))

    async def _replace(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> int:
        return await self._stream.write(
            self._subject(key), value, {"Nats-Rollup": "sub", **ttl_headers(ttl_s)}, revision
        )

    async def names(self) -> Sequence[str]:
        skip = len(self._prefix)
        return [subject[skip:] for subject in await self._stream.subjects()]

    async def scan(self, prefix: str, since: int = 1) -> Sequence[tuple[str, Entry]]:
        if prefix and not prefix.endswith("."):
            raise PeerError(f"{prefix!r} is not a prefix of whole tokens", code="invalid_id")
        skip, found = len(self._prefix), dict[str, Entry]()
        async for msgs in self._stream.since(f"{self._prefix}{prefix}>", since):
            for msg in msgs:  # a key written meanwhile comes again later
                key = (msg.headers or {})["Nats-Subject"][skip:]
                if _is_marker(msg):
                    found.pop(key, None)
                else:
                    found[key] = Entry(msg.data, sequence(msg))
        return list(found.items())

    def _subject(self, key: str) -> str:
        if not _KEY.fullmatch(key):
            raise PeerError(f"{key!r} is not a key", code="invalid_id")
        return self._prefix + key


class StreamLeases(StreamKeyValue):
    """The bucket of leases, whose stream keeps one message per key. All leases are gone after
    seconds, so an old lease that comes back does no harm. A holder may write its own lease only: it
    must neither purge nor roll up.
    """

    async def delete(self, key: str) -> None:
        await self._stream.write(
            self._subject(key), b"", {"KV-Operation": "DEL", **ttl_headers(MARKER_TTL_S)}
        )

    async def _replace(self, key: str, value: bytes, revision: int, ttl_s: float | None) -> int:
        return await self._stream.write(self._subject(key), value, ttl_headers(ttl_s), revision)


class StreamLog:
    """The logs of the replicas: a stream each, so that a worker can trim and read only its own."""

    def __init__(self, stream_of: Callable[[str], Stream]) -> None:
        """`stream_of`: the stream of a subject."""
        self._stream_of = stream_of

    async def append(self, subject: str, payload: bytes, expected_last: int) -> int:
        return await self._stream_of(subject).write(subject, payload, {}, expected_last)

    async def last(self, subject: str) -> tuple[int, bytes] | None:
        msg = await self._stream_of(subject).last(subject)
        return None if msg is None else (sequence(msg), msg.data)

    async def read(self, subject: str, after: int = 0) -> Sequence[tuple[int, bytes]]:
        return [
            (sequence(msg), msg.data)
            async for msgs in self._stream_of(subject).since(subject, after + 1)
            for msg in msgs
        ]

    async def trim(self, subject: str, below: int) -> None:
        if below > 1:  # JetStream takes 0 for "everything"
            await self._stream_of(subject).purge(subject, below)


def sequence(msg: Msg) -> int:
    return int((msg.headers or {})["Nats-Sequence"])


def _is_marker(msg: Msg) -> bool:
    """True for the marker of a deleted key, or an expired one where the bucket keeps markers."""
    headers = msg.headers or {}
    return "KV-Operation" in headers or "Nats-Marker-Reason" in headers


def ttl_headers(ttl_s: float | None) -> dict[str, str]:
    """The headers of a per-message TTL, in whole milliseconds; the least is a second."""
    return {} if ttl_s is None else {"Nats-TTL": f"{max(1_000, math.ceil(ttl_s * 1e3))}ms"}


def _check_unbroken(msgs: list[Msg], end: Msg) -> None:
    """Raise BusTimeout unless each message follows the one that it names: else some were lost."""
    named = [(msg.headers or {}).get("Nats-Last-Sequence") for msg in [*msgs[1:], end]]
    if named != [str(sequence(msg)) for msg in msgs]:
        raise BusTimeout("a listing broke off; read again")
