"""Handles HTTP requests with a body, from head to last byte: the tenant, the body within bounds,
every failure in the envelope, the client's correlation id in every answer, and the metrics.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from services.gateway.config import GatewayConfig
from services.gateway.http import envelope
from services.gateway.http.body import Arriving, Bodies
from services.gateway.http.connection import let_in
from services.gateway.http.envelope import Problem, Rejected
from services.gateway.http.guard import read_tenant
from services.gateway.http.headers import CORRELATION_ID, IGNORED, read_correlation_id
from shared.client.client import new_request_id
from shared.clock import Clock
from shared.core.shared_room import Shares
from shared.errors import BusError, PeerError
from shared.rules.rules import Rules
from shared.telemetry import conventions
from shared.telemetry.instruments import Registry

IGNORED_LIMIT = 512  # characters of names that are told


# the body of a failure, in the form of a route's API, which may name the request
Written = Callable[[Problem, str], bytes]


class CutOff(Exception):
    """An answer whose head has left cannot be completed: its connection is closed."""


class HttpRequest:
    """One HTTP request under way. `ignored`: fields left out, as the answer tells."""

    def __init__(
        self,
        http_requests: "HttpRequests",
        scope: Scope,
        receive: Receive,
        send: Send,
        began_unix_s: float,
        written: Written,
    ) -> None:
        self._written = written
        self.headers = Headers(scope=scope)
        self.query_string = scope["query_string"]
        self.path_params: dict[str, str] = scope.get("path_params", {})
        self.state: dict[str, Any] = scope.get("state", {})
        self.began_unix_s = began_unix_s
        self.body = Arriving(receive)
        if not ("content-length" in self.headers or "transfer-encoding" in self.headers):
            self.body.whole = True  # there is none
        self.tenant = ""
        self.request_id = new_request_id()  # until the client's own key has been read
        self.ignored = ""
        self.hung_up = False
        self.owes_end = False  # its answer ends once the rest of its body has come
        self.status = 0
        self._requests, self._send = http_requests, send
        self._correlation_id = read_correlation_id(self.headers)
        self._held = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            correlation_id = self._correlation_id or self.request_id
            message["headers"] = [
                *message["headers"],
                (CORRELATION_ID.encode(), correlation_id.encode()),
                *([(IGNORED.encode(), self.ignored.encode())] if self.ignored else []),
            ]
        await self._send(message)

    async def read(self) -> bytes:
        """The whole body. Raises Rejected past a bound, ClientDisconnect."""
        weight = self._requests.weight(self.tenant)
        return await self._requests.bodies.read(self.headers, self.body, self.tenant, weight)

    async def answer(
        self, content: bytes, status: int = 200, media_type: str = "application/json"
    ) -> None:
        headers = {"content-type": media_type, "content-length": str(len(content))}
        await self._start(status, headers)
        await self.send({"type": "http.response.body", "body": content})

    async def refuse(self, problem: Problem) -> None:
        """Answer a failure. A client whose body was not read to its end may read the answer only
        after it has sent all: its connection stays open for the rest, and closes then.
        """
        content, whole = self._written(problem, self.request_id), self.body.whole
        headers = {
            "content-type": "application/json",
            "content-length": str(len(content)),
            **({} if whole else {"connection": "close"}),
            **problem.headers(),
        }
        await self._start(problem.status, headers)
        self.owes_end = not whole
        await self.send({"type": "http.response.body", "body": content, "more_body": not whole})

    def ignore(self, names: list[str]) -> None:
        """Tell these fields as ignored."""
        self.ignored = ", ".join(ascii(name)[1:-1] for name in names)[:IGNORED_LIMIT].strip()

    def hold(self, choices: int) -> None:
        """Count more choices as being made. Raises Rejected if the tenant has too many."""
        self._requests.take(self.tenant, choices)
        self._held += choices

    def release(self) -> None:
        if self._held:
            self._requests.give(self.tenant, self._held)
            self._held = 0

    async def _start(self, status: int, headers: dict[str, str]) -> None:
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})


Serve = Callable[[HttpRequest], Awaitable[None]]


class HttpRequests:
    """All HTTP requests of one gateway. Set `draining` to let no more in."""

    def __init__(self, cfg: GatewayConfig, clock: Clock, registry: Registry, rules: Rules) -> None:
        self.draining = False
        self.bodies = Bodies(cfg)
        self._clock, self._rules = clock, rules
        self._open = Shares(cfg.requests_limit)  # choices; each is a request of its own
        self._responses = registry.counter(
            "slackline_gateway_responses_total",
            "Answers by HTTP status; 0: left without one.",
            ["status"],
        )
        self._hung_up = registry.counter(
            "slackline_gateway_hung_up_total", "Answers cancelled because their client left."
        ).labels()
        self._unfinished = registry.gauge(
            "slackline_gateway_unfinished_requests", "Choices being made."
        ).labels()
        self._duration = registry.histogram(
            "slackline_gateway_request_duration_seconds",
            "From a request's head to its last byte.",
            conventions.DURATION_BUCKETS_S,
        ).labels()

    def route(self, serve: Serve, written: Written = envelope.written) -> "Served":
        """The ASGI application of one route."""
        return Served(self, serve, written)

    def weight(self, tenant: str) -> float:
        return self._rules.tenants.named(tenant).weight

    def take(self, tenant: str, choices: int) -> None:
        """Count `choices` more as being made. Raises Rejected if the tenant has too many."""
        weight = self.weight(tenant)
        if not self._open.fits(tenant, weight, choices):
            raise Rejected(envelope.SATURATED)
        self._open.take(tenant, weight, choices)
        self._unfinished.set(self._open.total)

    def give(self, tenant: str, choices: int) -> None:
        self._open.give(tenant, choices)
        self._unfinished.set(self._open.total)

    async def run(
        self, serve: Serve, written: Written, scope: Scope, receive: Receive, send: Send
    ) -> None:
        http_request = HttpRequest(self, scope, receive, send, self._clock.unix_s(), written)
        try:
            # A client that left before it had sent a request gets no answer.
            with suppress(ClientDisconnect, CutOff):
                await self._serve(serve, http_request)
        finally:
            http_request.release()
            self._responses.labels(str(http_request.status)).add()
            self._duration.observe(self._clock.unix_s() - http_request.began_unix_s)
            if http_request.hung_up:
                self._hung_up.add()
        if http_request.owes_end:
            await http_request.body.drop()
            await send({"type": "http.response.body"})

    async def _serve(self, serve: Serve, http_request: HttpRequest) -> None:
        try:
            if self.draining:
                raise Rejected(envelope.SHUTTING_DOWN)
            http_request.tenant = read_tenant(http_request.headers, self._rules.keys)
            http_request.hold(1)
            let_in(http_request.state)
            await serve(http_request)
        except Rejected as rejected:
            await http_request.refuse(rejected.problem)
        except (PeerError, BusError) as error:
            await http_request.refuse(envelope.of_error(error))


class Served:
    """A callable object: Starlette passes the raw ASGI call to an object, not to a function."""

    def __init__(self, http_requests: HttpRequests, serve: Serve, written: Written) -> None:
        self._requests, self._serve, self._written = http_requests, serve, written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._requests.run(self._serve, self._written, scope, receive, send)
