"""The real bus: one NATS connection per process, JetStream, the services API. Only this module and
its neighbours (nats_client, inbox, jetstream, provision, subscriptions) import the NATS client.
"""

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import nats.errors
import structlog
from msgspec import Struct
from nats.aio.client import Server
from nats.aio.msg import Msg
from nats.micro.request import Request
from nats.micro.service import EndpointStats

from shared import subjects
from shared.bus import codec, provision
from shared.bus.api import Counters, Endpoint, Gate, Handler, KeyValue, Log, Subscription
from shared.bus.deadline import Deadline
from shared.bus.inbox import OUTBOUND_BYTES, Outbox, ReplyInbox
from shared.bus.jetstream import Stream, StreamKeyValue, StreamLeases, StreamLog, StreamSize
from shared.bus.nats_client import OrderedClient, trusting
from shared.bus.objects import Objects
from shared.bus.subscriptions import Intake, register
from shared.bus.users import OPERATOR, User
from shared.errors import BusError, BusTimeout, ConfigError, PeerError
from shared.schemas import Refused

T = TypeVar("T")
log = structlog.get_logger()

SCHEMES = ("nats", "tls", "ws", "wss")
CONNECT_S = 30.0  # a server that starts together with us may take that long
STORE_S = 2.0  # a write takes 0.2 ms, at worst 8 ms; a cluster elects a leader within 2 s
CLOSE_S = 1.0  # for the socket, after the drain
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.05, 2.0
PING_S = 5  # a silent server is noticed after three such pauses
CANCEL_AGAIN_S = 0.05
COMPLAIN_EVERY_S = 1.0
# the errors by which a lost connection shows
LOST = (OSError, nats.errors.StaleConnectionError, nats.errors.TimeoutError)


class NatsCall:
    __slots__ = ("_msg", "_outbox", "json")

    def __init__(self, msg: Msg, outbox: Outbox) -> None:
        self._msg = msg
        self._outbox = outbox
        self.json = codec.speaks_json(msg.headers)

    @property
    def subject(self) -> str:
        return str(self._msg.subject)

    @property
    def headers(self) -> Mapping[str, str]:
        return self._msg.headers or {}

    @property
    def payload_bytes(self) -> int:
        return len(self._msg.data)

    async def reply(self, msg: Struct) -> None:
        if not self._msg.reply:
            return
        headers = codec.refusal_headers(msg) if isinstance(msg, Refused) else None
        headers = codec.with_content_type(headers, json=self.json)
        await self._outbox.send(self._msg.reply, codec.encode(msg, json=self.json), headers=headers)


class NatsBus:
    """A Bus (shared/bus/api.py) on a connected client; `connect` makes one."""

    def __init__(self, client: OrderedClient, user: User, store_timeout_s: float) -> None:
        self.tenants = user.tenants
        self.counters = Counters()
        # This future never has a result. It has an exception once a handler failed or the server
        # closed the connection for good: the service's main waits for it and ends.
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client, self._user, self._store_timeout_s = client, user, store_timeout_s
        self._deadline = Deadline()
        self._outbox = Outbox(client, self._deadline)
        self._inbox = ReplyInbox(client, self._outbox, user, self._deadline)
        self._intakes: set[Intake] = set()
        self._closing = False
        self._down_at_s: float | None = None
        self._complained_at_s: dict[str, float] = {}
        self.requests: KeyValue = self._bucket(subjects.REQUESTS_BUCKET)
        self.bodies: KeyValue = self._bucket(subjects.BODIES_BUCKET)
        self._lease_stream = self._stream(f"KV_{subjects.LEASES_BUCKET}")
        self.leases: KeyValue = StreamLeases(self._lease_stream, subjects.LEASES_BUCKET)
        self.usage: KeyValue = self._bucket(subjects.USAGE_BUCKET)
        self.history: KeyValue = self._bucket(subjects.HISTORY_BUCKET)
        self.acks: Log = StreamLog(self._log_of)
        # only for gateways
        self.batches = self._bucket(subjects.BATCHES_BUCKET)
        self.files = Objects(self._stream(f"OBJ_{subjects.FILES_BUCKET}"), subjects.FILES_BUCKET)

    async def publish(
        self,
        subject: str,
        msg: Struct,
        *,
        headers: Mapping[str, str] | None = None,
        json: bool = False,
    ) -> None:
        """Send a message; dropped and counted as unsent where OUTBOUND_BYTES wait already. Raises
        PeerError for an impossible subject, BusError if closed or over the server's limit.
        """
        try:
            await self._outbox.send(
                subject,
                codec.encode(msg, json=json),
                headers=codec.with_content_type(headers, json=json),
            )
        except BusTimeout:
            self.counters.unsent += 1
            self._complain(
                "message.unsent",
                subject.rpartition(".")[0],
                waiting_bytes=self._client.pending_data_size,
            )

    async def request(
        self,
        subject: str,
        msg: Struct,
        kind: type[T] | UnionType,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> T:
        payload = codec.encode(msg, json=False)
        answer = await self._inbox.ask(subject, payload, headers=headers, timeout_s=timeout_s)
        typed: T = codec.answer(kind, answer.data, answer.headers)
        return typed

    async def subscribe(
        self, subject: str, kind: Any, handler: Handler, *, queue: str = ""
    ) -> Subscription:
        """Subscribe; the subscription is in force when this returns."""

        async def on_message(msg: Msg) -> None:
            await self._hand_over(msg, subject, kind, handler)

        intake = self._take_in()
        await intake.subscribe(subject, queue, on_message)
        return await self._in_force(intake)

    async def serve(
        self, name: str, endpoints: Sequence[Endpoint], metadata: Mapping[str, str]
    ) -> Subscription:
        """Serve; the endpoints are in force on return. Bad payloads count in their STATS."""
        refused: Counter[str] = Counter()

        def add_errors(stats: EndpointStats) -> None:
            stats.num_errors += refused[stats.name]

        def on_request(endpoint: Endpoint) -> Any:
            async def handle(request: Request) -> None:
                # the reply comes later, from elsewhere: we need the message, not micro's view
                if not await self._hand_over(
                    request._msg, endpoint.subject, endpoint.kind, endpoint.handler, endpoint.gate
                ):
                    refused[endpoint.name] += 1

            return handle

        intake = self._take_in()
        await register(
            intake,
            name,
            [(endpoint, on_request(endpoint)) for endpoint in endpoints],
            metadata,
            add_errors,
        )
        return await self._in_force(intake)

    async def flush(self, timeout_s: float) -> None:
        """Wait until the server has all that was sent. Raises BusTimeout, BusError when closed."""
        try:
            async with asyncio.timeout(self._deadline.within(timeout_s)):
                await self._client.flush()
        except TimeoutError as error:  # nats-py's own timeout is one, too
            raise BusTimeout(f"the server did not confirm within {timeout_s:g} s") from error
        except nats.errors.Error as error:
            raise BusError(f"cannot flush: {error}") from error

    async def server_unix_s(self) -> float:
        return await self._lease_stream.leader_unix_s()

    async def stream_sizes(self) -> Mapping[str, StreamSize]:
        """The size of each stream that the user may ask about, by name. Raises BusError."""
        names = [str(config.name) for config in provision.streams_of(self._user)]
        return {name: await self._stream(name).size() for name in names}

    @property
    def server(self) -> tuple[str, int] | None:
        """Host and port of the server to which the bus is connected; None: to none now."""
        url = self._client.connected_url
        return None if url is None else (url.hostname or "", url.port or 0)

    async def open(
        self, url: str, name: str, connect_s: float, creds: str = "", tls_ca: str = ""
    ) -> None:
        """Connect, and check the server and the streams that the user needs. Raises ConfigError."""
        options = self._client.log_in(creds) if creds else {}
        if tls_ca:
            options["tls"] = trusting(tls_ca)
        opening = asyncio.ensure_future(self._open(url, name, options))
        try:
            await asyncio.wait({opening}, timeout=connect_s)
            if opening.done():
                opening.result()
                return
        finally:
            await _given_up(opening)
        last = self._client.last_error
        why = f" ({last})" if last else ""
        if isinstance(last, ssl.SSLCertVerificationError):
            why += "; name its authority in SLACKLINE_TLS_CA, and your key in SLACKLINE_CREDS"
        raise ConfigError(
            f"no NATS server let us in at {_without_password(url)} within {connect_s:g} s{why}"
        )

    async def _open(self, url: str, name: str, options: Mapping[str, Any]) -> None:
        try:
            # Subjects are validated: 0.1 of the 2.5 us of sending, and no CRLF in the protocol.
            await self._client.connect(
                url.split(","),
                name=name,
                inbox_prefix=self._user.inboxes[-1],
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                reconnect_to_server_handler=_next_server,
                # only for the first connection; later _next_server decides
                reconnect_time_wait=1,
                max_reconnect_attempts=-1,
                ping_interval=PING_S,
                pending_size=4 * OUTBOUND_BYTES,  # never reached: Outbox stops earlier
                flush_timeout=CLOSE_S,
                **options,
            )
        except (nats.errors.Error, ValueError) as error:
            raise ConfigError(f"cannot connect to {_without_password(url)}: {error}") from error
        await self._inbox.open()
        provision.check_server(self._client)
        await provision.check_streams(self._client, self._user, self._store_timeout_s)

    async def make_streams(self, replicas: Iterable[str], copies: int | None = None) -> list[str]:
        """Make the missing buckets and logs of these replicas, and bring the others to this
        release and this many copies. Only the operator may. Returns in words what was broken or
        changed. Raises ConfigError, BusTimeout.
        """
        return await provision.make_streams(self._client, replicas, copies, self._store_timeout_s)

    def end_within(self, limit_s: float) -> None:
        """The process stops: no wait of this connection ends later than this from now on."""
        self._deadline.at_s = asyncio.get_running_loop().time() + limit_s
        self._inbox.hasten()

    async def close(self, drain_s: float) -> None:
        """Hand over received messages, send published ones, close: within drain_s + CLOSE_S. 0:
        nothing was received or published yet.
        """
        self._closing = True
        was_open = self._client.is_connected or self._client.is_reconnecting
        try:
            async with asyncio.timeout(self._deadline.within(drain_s)):
                await asyncio.gather(*(intake.stop() for intake in self._intakes))
                if self._client.is_connected and drain_s:
                    await self.flush(drain_s)
        except (TimeoutError, BusError) as error:
            log.warning("bus.drain_failed", drain_s=drain_s, error=str(error))
        finally:
            # nats-py's close may swallow a cancellation or wait for a dead socket: not for long
            closing = asyncio.ensure_future(self._client.close())
            await asyncio.wait({closing}, timeout=CLOSE_S)
            if not closing.done():
                closing.cancel()
            elif closing.exception() is not None and was_open:
                log.warning("bus.close_failed", error=repr(closing.exception()))
            if (reconnecting := self._client._reconnection_task) is not None:
                await _given_up(reconnecting)
            if not self.failed.done():
                self.failed.cancel()
            elif not self.failed.cancelled():
                self.failed.exception()  # marks it as read: `connect` may end with another error

    def raise_failure(self) -> None:
        """Raise the exception that ended this bus, if one did."""
        if self.failed.done() and not self.failed.cancelled():
            self.failed.result()

    def _stream(self, name: str) -> Stream:
        return Stream(self._inbox, name, self._store_timeout_s)

    def _bucket(self, name: str) -> StreamKeyValue:
        return StreamKeyValue(self._stream(f"KV_{name}"), name)

    def _log_of(self, subject: str) -> Stream:
        return self._stream(subjects.log_stream(subject.rpartition(".")[2]))

    def _take_in(self) -> Intake:
        intake = Intake(
            self._client,
            on_stop=self._intakes.discard,
            on_refused=self._refuse_message,
            deadline=self._deadline,
        )
        self._intakes.add(intake)
        return intake

    async def _in_force(self, intake: Intake) -> Intake:
        """The intake, once the server confirms it. Raises BusTimeout, with nothing subscribed."""
        try:
            await self.flush(STORE_S)
        except BaseException:
            await intake.stop()
            raise
        return intake

    def _refuse_message(self, pattern: str, msg: Msg) -> None:
        self.counters.bad_payloads += 1
        self._complain("message.refused", pattern, sent_to=msg.subject, answer_to=msg.reply)

    async def _hand_over(
        self, msg: Msg, pattern: str, kind: Any, handler: Handler, gate: Gate | None = None
    ) -> bool:
        """Decode, and call the handler. False for a bad payload; other failures end the service."""
        call = NatsCall(msg, self._outbox)
        if gate is not None and (refused := gate(call)) is not None:
            with contextlib.suppress(BusError, PeerError):  # its sender asks again
                await call.reply(refused)
            return True
        try:
            decoded = codec.received(kind, msg.subject, msg.data, json=call.json)
        except PeerError as error:
            self.counters.bad_payloads += 1
            self._complain(
                "payload.refused",
                pattern,
                sent_to=msg.subject,
                payload_bytes=len(msg.data),
                at=error.param,  # its text may quote the payload, which is only for the sender
            )
            with contextlib.suppress(BusError, PeerError):  # its sender asks again
                await call.reply(codec.refusal(error))
            return False
        try:
            handler(decoded, call)
        except Exception as error:
            log.exception("handler.failed", subject=msg.subject)
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _complain(self, event: str, about: str, **facts: object) -> None:
        """Log at most once a second for each event and subject pattern, of which there are few."""
        now_s, about_what = asyncio.get_running_loop().time(), f"{event} {about}"
        if now_s - self._complained_at_s.get(about_what, -COMPLAIN_EVERY_S) >= COMPLAIN_EVERY_S:
            self._complained_at_s[about_what] = now_s
            log.warning(event, subject=about, counters=self.counters, **facts)

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.dropped += 1
            self._complain("message.dropped", error.sub.subject, sent_to=error.subject)
        elif isinstance(error, LOST) or not self._client.is_connected:
            # a lost and a restored connection have one line each
            log.debug("bus.unreachable", error=repr(error))
        else:
            log.warning("bus.error", error=repr(error))

    async def _on_disconnected(self) -> None:
        if self._closing:
            return
        self.counters.disconnects += 1
        self._down_at_s = asyncio.get_running_loop().time()
        log.warning("bus.disconnected")

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        down_s = (
            0.0 if self._down_at_s is None else asyncio.get_running_loop().time() - self._down_at_s
        )
        log.warning("bus.reconnected", down_s=round(down_s, 3))

    async def _on_closed(self) -> None:
        """Closed by us, or for good by the server: a bus that cannot send ends its service."""
        if not self._closing:
            log.error("bus.closed", error=str(self._client.last_error))
            self._fail(BusError(f"the server closed the connection: {self._client.last_error}"))


@contextlib.asynccontextmanager
async def connect(
    url: str,
    name: str,
    user: User = OPERATOR,
    *,
    creds: str = "",
    tls_ca: str = "",
    drain_s: float = 5.0,
    connect_s: float = CONNECT_S,
    store_timeout_s: float = STORE_S,
) -> AsyncIterator[NatsBus]:
    """A bus on the server(s) at `url` (separated by commas), as this user. `creds`: a file with the
    user's seed (or JWT and seed); `tls_ca`: the trusted authority's certificate; or empty.

    Raises ConfigError at once for a wrong URL or a missing feature, and after connect_s if no
    server has let us in and told of its streams. The bus reconnects for ever. On exit it sends
    published messages within drain_s, and raises a handler's failure that nobody awaited.
    """
    _check(url)
    bus = NatsBus(OrderedClient(), user, store_timeout_s)
    to_drain_s = 0.0
    try:
        await bus.open(url, name, connect_s, creds, tls_ca)
        to_drain_s = drain_s
        log.info("bus.connected", server=_without_password(url), name=name)
        yield bus
    finally:
        await bus.close(to_drain_s)
    bus.raise_failure()


async def _given_up(connecting: "asyncio.Future[None]") -> None:
    """Cancel the way to a server until it ends. nats-py waits with asyncio.wait_for(), which
    swallows a cancellation that comes with what it waits for (Python 3.11), and would try for ever.
    """
    while not connecting.done():
        connecting.cancel()
        await asyncio.wait({connecting}, timeout=CANCEL_AGAIN_S)
    if not connecting.cancelled():
        connecting.exception()  # marks it as read


def _next_server(servers: list[Server], _info: dict[str, Any]) -> tuple[Server, float]:
    """The server tried least often, after a wait that doubles up to LONGEST_BACKOFF_S."""
    server = min(servers, key=lambda s: s.reconnects)
    return server, min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(server.reconnects, 10))


def _check(urls: str) -> None:
    """Raises ConfigError unless each is the URL of a NATS server."""
    for url in urls.split(","):
        try:
            parts = urlsplit(url)
            fit = parts.scheme in SCHEMES and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number, or over 65535
            fit = False
        if not fit:
            raise ConfigError(
                "the URL of a NATS server is nats://HOST:PORT (or tls://, ws://, wss://), not "
                f"`{url.rpartition('@')[2][:256]}`"
            )


def _without_password(urls: str) -> str:
    return ",".join(
        f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        for parts in map(urlsplit, urls.split(","))
    )
