"""Requests and replies over one wildcard subscription, for the bus in place of nats-py's request().
A cancellation or a deadline always takes effect (Python 3.11's asyncio.wait_for may swallow one), a
request may have many replies, and failed sending leaves nothing behind.
"""

import asyncio
import math
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared.bus.deadline import Deadline
from shared.bus.users import User
from shared.errors import BusError, BusTimeout, NoResponders, PeerError

T = TypeVar("T")

# The queue of one subscription: half a second of backlog at 30,000 messages/s, the most that one
# takes. Nobody still waits for older replies.
PENDING_MSGS = 16_384
PENDING_BYTES = 128 * 1024 * 1024  # 16 messages of the largest size
OUTBOUND_BYTES = 16 * 1024 * 1024  # two messages of the largest size may wait for the socket
CONGESTED_S = 2.0  # the longest that a sender waits for room in the socket
_POLL_S = 0.001
# Between two looks for questions without an answer. All questions share one timer: asyncio.timeout
# takes 6 us for each, and nearly all are answered within 1 ms.
LOOK_S = 0.05


class Outbox:
    """Sends up to a limit of waiting bytes, since nats-py's own limit swallows cancellations."""

    def __init__(self, client: Client, deadline: Deadline) -> None:
        self._client, self._deadline = client, deadline

    async def send(
        self,
        subject: str,
        payload: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Hand a message to the socket; while disconnected, up to OUTBOUND_BYTES wait. Raises
        PeerError for an impossible subject, BusTimeout where too many wait, BusError for a closed
        connection or a payload over the limit.
        """
        if len(payload) > self._client.max_payload:
            raise BusError(
                f"{len(payload)} bytes for {subject}: "
                f"the server's max_payload is {self._client.max_payload}"
            )
        if self._client.pending_data_size > OUTBOUND_BYTES:
            await self._wait_for_room(subject)
        try:
            await self._client.publish(
                subject, payload, reply=reply, headers=None if headers is None else dict(headers)
            )
        except nats.errors.BadSubjectError as error:
            raise PeerError(f"{subject!r} is not a subject", code="invalid_id") from error
        except nats.errors.Error as error:
            raise BusError(f"cannot send to {subject}: {error}") from error

    async def _wait_for_room(self, subject: str) -> None:
        give_up_at_s = asyncio.get_running_loop().time() + self._deadline.within(CONGESTED_S)
        while self._client.pending_data_size > OUTBOUND_BYTES:
            if not self._client.is_connected or asyncio.get_running_loop().time() > give_up_at_s:
                raise BusTimeout(
                    f"cannot send to {subject}: {self._client.pending_data_size} bytes wait already"
                )
            await asyncio.sleep(_POLL_S)


class _FutureOfEach:
    """Stands in for the future of a subscription's only message: nats-py sets its result for every
    message, as soon as that is read. A callback would have it 50 us later, from a task behind a
    queue. A reply need not wait there: it only wakes the task that asked.
    """

    def __init__(self, on_message: Callable[[Msg], None]) -> None:
        self.set_result = on_message

    def cancelled(self) -> bool:
        return False


class _Asked(NamedTuple):
    """A question: the callback for its replies, and a future that is done with the last of them."""

    on_answer: Callable[[Msg], None]
    done: "asyncio.Future[Any]"
    until_s: float  # by the clock of the loop


class ReplyInbox:
    """The subjects of all replies of a connection. Open it before the first request."""

    def __init__(self, client: Client, outbox: Outbox, user: User, deadline: Deadline) -> None:
        self._client, self._deadline = client, deadline
        self._outbox = outbox
        self._user = user
        self._name = client.new_inbox().rpartition(".")[2]
        self._waiting: dict[str, _Asked] = {}
        self._looking = False  # a timer is set

    def hasten(self) -> None:
        """The deadline has changed: the questions that wait have it, too."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._deadline.within(math.inf)
        self._waiting = {
            token: asked._replace(until_s=min(asked.until_s, until_s))
            for token, asked in self._waiting.items()
        }

    async def open(self) -> None:
        future = cast("asyncio.Future[Msg]", _FutureOfEach(self._on_answer))
        for prefix in self._user.inboxes:
            await self._client.subscribe(f"{prefix}.{self._name}.*", future=future)

    async def ask(
        self,
        subject: str,
        payload: bytes,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Msg:
        """The first reply. Raises NoResponders, BusError, BusTimeout (up to LOOK_S late)."""
        first: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        def on_answer(msg: Msg) -> None:
            if not first.done():
                first.set_result(msg)

        msg = await self._ask(subject, payload, headers, on_answer, first, timeout_s)
        if status(msg) == "503":
            raise NoResponders(f"nobody serves {subject}")
        return msg

    async def ask_many(self, subject: str, payload: bytes, *, timeout_s: float) -> list[Msg]:
        """All replies, with the bare status at their end. Raises BusTimeout, BusError."""
        msgs: list[Msg] = []
        complete: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_answer(msg: Msg) -> None:
            msgs.append(msg)
            if status(msg) and not complete.done():
                complete.set_result(None)

        await self._ask(subject, payload, None, on_answer, complete, timeout_s)
        return msgs

    async def _ask(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        on_answer: Callable[[Msg], None],
        done: "asyncio.Future[T]",
        timeout_s: float,
    ) -> T:
        # A token that can be guessed would let a peer answer questions that it was not asked.
        token = secrets.token_hex(8)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._deadline.within(timeout_s)
        self._waiting[token] = _Asked(on_answer, done, until_s)
        if not self._looking:
            self._looking = True
            loop.call_later(LOOK_S, self._look)
        try:
            await self._outbox.send(
                subject,
                payload,
                reply=f"{self._user.inbox_of(subject)}.{self._name}.{token}",
                headers=headers,
            )
            return await done
        except TimeoutError as error:
            raise BusTimeout(f"no answer from {subject} within {timeout_s:g} s") from error
        finally:
            del self._waiting[token]
            if done.done() and not done.cancelled():
                done.exception()  # marks the exception as read, also where sending failed first

    def _look(self) -> None:
        """Fail the questions whose time is over, and look again while there are others."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for asked in self._waiting.values():
            if asked.until_s <= now_s and not asked.done.done():
                asked.done.set_exception(TimeoutError())
        self._looking = bool(self._waiting)
        if self._looking:
            loop.call_later(LOOK_S, self._look)

    def _on_answer(self, msg: Msg) -> None:
        asked = self._waiting.get(msg.subject.rpartition(".")[2])
        if asked is not None:
            asked.on_answer(msg)


def status(msg: Msg) -> str:
    """The status of a message that has only that ("503", "404", "204"); else empty."""
    return "" if msg.data or not msg.headers else msg.headers.get("Status", "")
