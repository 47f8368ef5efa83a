"""What services ask of a bus. Two implementations: NATS (shared/bus/nats.py) and a simulated one
(shared/testing/simulated_bus.py).

Handlers are plain functions, called in order of arrival on the event loop: they must not block and
start tasks for anything longer. All waits have a deadline. A BusTimeout leaves the effect unknown;
callers re-read.
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
    """The peer answered no; `refused` says why, in its words."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.message, code=refused.code, param=refused.param)
        self.refused = refused


@dataclass(slots=True)
class Counters:
    """What went wrong on one connection since it began."""

    bad_payloads: int = 0  # messages that did not decode
    dropped: int = 0  # messages in, lost because a subscription's queue was full
    unsent: int = 0  # messages out, dropped because the connection could not take them
    disconnects: int = 0
    reconnects: int = 0


class Call(Protocol):
    """One incoming message."""

    @property
    def subject(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def wants_reply(self) -> bool: ...

    @property
    def json(self) -> bool:
        """The sender speaks JSON; replies follow suit."""

    async def reply(self, msg: Struct) -> None:
        """Answer. A `Refused` is sent as a services-API error as well. Nothing happens where no
        reply is wanted.
        """


Handler = Callable[[Any, Call], None]


class Subscription(Protocol):
    async def stop(self) -> None:
        """No new messages; those received have been handed to the handler."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A request/reply endpoint, registered with the NATS services API. Bad payloads are answered
    `Refused` by the bus.
    """

    name: str
    subject: str
    kind: Any  # the type to decode, a Struct or a union of tagged ones
    handler: Handler
    queue: str = ""  # empty: every instance hears it


@dataclass(frozen=True, slots=True)
class Entry:
    value: bytes
    revision: int


class KeyValue(Protocol):
    """A bucket. Keys of [A-Za-z0-9_.-]."""

    async def get(self, key: str) -> Entry | None: ...

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None) -> int:
        """The revision. Raises WrongSequence if the key lives."""

    async def update(
        self, key: str, value: bytes, revision: int, *, ttl_s: float | None = None
    ) -> int:
        """The new revision. Raises WrongSequence if `revision` is not the present one."""

    async def delete(self, key: str) -> None: ...

    async def scan(self, prefix: str) -> Sequence[tuple[str, Entry]]:
        """Every living key that begins with `prefix` (whole tokens, ending in a dot)."""


class Log(Protocol):
    """An append-only stream with a subject per replica. Sequences are the stream's; 0 means
    none.
    """

    async def append(self, subject: str, payload: bytes, expected_last: int) -> int:
        """The sequence. Raises WrongSequence unless the subject's last sequence is
        `expected_last`.
        """

    async def last(self, subject: str) -> tuple[int, bytes] | None: ...

    async def read(self, subject: str, after: int = 0) -> Sequence[tuple[int, bytes]]:
        """All entries of the subject with a sequence above `after`."""

    async def trim(self, subject: str, below: int) -> None:
        """Forget the subject's entries with a sequence under `below`."""


class Bus(Protocol):
    """One connection of one process."""

    @property
    def requests(self) -> KeyValue: ...

    @property
    def leases(self) -> KeyValue:
        """Every value vanishes LEASE_TTL_S after its last write."""

    @property
    def acks(self) -> Log: ...

    async def publish(
        self,
        subject: str,
        msg: Struct,
        *,
        headers: Mapping[str, str] | None = None,
        json: bool = False,
    ) -> None:
        """Fire and forget: at most once."""

    async def request(
        self,
        subject: str,
        msg: Struct,
        kind: type[T] | UnionType,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        """Raises NoResponders, BusTimeout, or PeerError (the answer is not a `kind`; RefusedError
        where it was a Refused).
        """

    async def subscribe(
        self, subject: str, kind: Any, handler: Handler, *, queue: str = ""
    ) -> Subscription:
        """Bad payloads are counted, logged and dropped (answered Refused where a reply is
        wanted).
        """

    async def serve(
        self, name: str, endpoints: Sequence[Endpoint], metadata: Mapping[str, str]
    ) -> Subscription:
        """Register a service instance and its endpoints with the services API."""

    async def flush(self, timeout_s: float) -> None: ...


LEASE_TTL_S = 3.0  # three missed renewals of 1 s
