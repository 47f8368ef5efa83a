"""The bus as services see it: NATS (shared/bus/nats.py) or simulated (tests/simulated/bus.py).

Handlers are plain functions, called in order on the event loop; they must not block, but start
tasks. Every wait has a deadline. After a BusTimeout the effect is unknown: read again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Protocol, TypeVar

from msgspec import Struct

from shared.errors import PeerError
from shared.schemas import Refused

T = TypeVar("T")


class RefusedError(PeerError):
    """The peer refused; `refused` is its answer."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, code=refused.code, param=refused.param)
        self.refused = refused


@dataclass(slots=True)
class Counters:
    """The failures of one connection since it began."""

    bad_payloads: int = 0  # messages that did not decode
    dropped: int = 0  # incoming messages lost because a subscription's queue was full
    unsent: int = 0  # outgoing messages dropped because the connection could not take them
    disconnects: int = 0
    reconnects: int = 0


class Call(Protocol):
    """One incoming message."""

    @property
    def subject(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def payload_bytes(self) -> int: ...

    @property
    def json(self) -> bool:
        """True if the sender uses JSON, so that the reply does too."""

    async def reply(self, msg: Struct) -> None:
        """Send the answer, a `Refused` also as a services-API error, if a reply is wanted."""


Handler = Callable[[Any, Call], None]
Gate = Callable[[Call], Refused | None]


class Subscription(Protocol):
    async def stop(self) -> None:
        """End the subscription: messages received before are handed to the handler, no others."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint of the NATS services API. The bus answers bad payloads with `Refused`."""

    name: str
    subject: str
    kind: Any  # the type to decode, a Struct or a union of tagged ones
    handler: Handler
    queue: str = ""  # empty: every instance receives every request
    # called before a message is decoded: a refusal that it returns is the answer
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    value: bytes
    revision: int


class KeyValue(Protocol):
    """A bucket; keys are [A-Za-z0-9_.-]. Writes raise StoreFull without room, deletes do not."""

    async def get(self, key: str) -> Entry | None: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """Write a new key and return its revision. Raises WrongSequence if the key exists."""

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        """Write; return the new revision. Raises WrongSequence unless `revision` is current."""

    async def delete(self, key: str) -> None: ...

    async def names(self) -> Sequence[str]:
        """The keys of the whole bucket, without their values; also keys deleted a moment ago."""

    async def scan(self, prefix: str, since: int = 1) -> Sequence[tuple[str, Entry]]:
        """Keys that begin with `prefix` (whole tokens and a dot; at a server `*` stands for any
        token), written at `since` or later.
        """


class Log(Protocol):
    """An append-only stream with a subject per replica. Sequence 0 means that there is no entry."""

    async def append(self, subject: str, payload: bytes, expected_last: int) -> int:
        """Append; return its sequence. Raises WrongSequence unless the last is as expected."""

    async def last(self, subject: str) -> tuple[int, bytes] | None: ...

    async def read(self, subject: str, after: int = 0) -> Sequence[tuple[int, bytes]]:
        """All entries of the subject with a sequence above `after`."""

    async def trim(self, subject: str, below: int) -> None:
        """Delete the subject's entries with a sequence under `below`."""


class Bus(Protocol):
    """One connection of one process."""

    counters: Counters
    tenants: str
    """The tenant that the connection speaks for; `*` for all of them, empty for none."""
    requests: KeyValue
    bodies: KeyValue
    leases: KeyValue
    """The bucket in which every value vanishes LEASE_TTL_S after its last write."""
    usage: KeyValue
    """What each tenant used, by day."""
    history: KeyValue
    """What became of ended requests (shared/store/history.py)."""
    acks: Log

    async def publish(
        self,
        subject: str,
        msg: Struct,
        *,
        headers: Mapping[str, str] | None = None,
        json: bool = False,
    ) -> None:
        """Send a message that arrives at most once; nothing confirms it."""

    async def request(
        self,
        subject: str,
        msg: Struct,
        kind: type[T] | UnionType,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """The answer. Raises NoResponders, BusTimeout, PeerError (RefusedError for a Refused)."""

    async def subscribe(
        self, subject: str, kind: Any, handler: Handler, *, queue: str = ""
    ) -> Subscription:
        """Call `handler` for each message. Bad payloads are counted, logged, dropped or refused."""

    async def serve(
        self, name: str, endpoints: Sequence[Endpoint], metadata: Mapping[str, str]
    ) -> Subscription:
        """Register a service instance and its endpoints with the services API."""

    async def flush(self, timeout_s: float) -> None: ...

    async def server_unix_s(self) -> float:
        """The wall clock of the server that leads the leases. Raises BusError."""


LEASE_TTL_S = 3.0  # three missed renewals of 1 s
