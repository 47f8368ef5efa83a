"""The routes of the gateway, and their metrics. Every failure is answered in OpenAI's envelope."""

import asyncio
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import NamedTuple, cast

import msgspec
from msgspec import UNSET, UnsetType
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway import chats, completions, envelope, translate
from services.gateway.alive import Fleet
from services.gateway.asking import AskBody, without_unknown
from services.gateway.body import Arriving, Bodies
from services.gateway.chats import ChatBody
from services.gateway.completions import CompletionBody
from services.gateway.config import GatewayConfig
from services.gateway.console import Console
from services.gateway.envelope import Problem, Rejected
from services.gateway.exchange import Exchanges
from services.gateway.guard import read_tenant
from services.gateway.model_list import Model, ModelList
from services.gateway.translate import CORRELATION_ID
from shared.client.client import Client, new_request_id
from shared.client.ping import answers
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.process import conventions, telemetry
from shared.process.about import about
from shared.process.exposition import exposition
from shared.process.gen_ai import GenAi
from shared.process.instruments import Registry
from shared.rules import Rules

READY_S = 1.0  # for the answer of an admission; it takes 1 ms
IGNORED_LIMIT = 512  # characters of names that are told


class Api(NamedTuple):
    """One of OpenAI's two: the kind of its bodies, and how they are read."""

    kind: type[AskBody]
    read: Callable[[bytes], CompletionBody | ChatBody]


CHAT, COMPLETIONS = Api(ChatBody, chats.read_body), Api(CompletionBody, completions.read_body)


class Gateway:
    """The HTTP application over one Client. Its tasks live in `tasks`. Set `draining` before the
    listener closes.
    """

    def __init__(
        self,
        cfg: GatewayConfig,
        rules: Rules,
        client: Client,
        fleet: Fleet,
        clock: Clock,
        registry: Registry,
        tracing: telemetry.Tracing,
        gen_ai: GenAi,
        tasks: asyncio.TaskGroup,
        console: Console,
    ) -> None:
        self._console = console
        self.draining = False
        self._cfg = cfg
        self._rules = rules
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._about, self._registry = about("gateway"), registry
        self._bodies = Bodies(cfg)
        self._exchanges = Exchanges(cfg, client, fleet, clock, tracing, gen_ai, tasks)
        self._open = 0  # open choices; each is a request of its own
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

    def app(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", _Asgi(self.chat), methods=["POST"]),
                Route("/v1/completions", _Asgi(self.completions), methods=["POST"]),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/version", self.version, methods=["GET"]),
                Route("/health", self.health, methods=["GET"]),
                Route("/ready", self.ready, methods=["GET"]),
                Route("/metrics", self.metrics, methods=["GET"]),
                *self._console.routes(),
            ],
            exception_handlers={
                HTTPException: _no_such_thing,
                Rejected: _refused,
                PeerError: _refused,
                BusError: _refused,
            },
        )
        app.router.redirect_slashes = False  # to an address made of the client's own Host header
        return app

    async def health(self, _: Request) -> Response:
        return Response('{"status":"ok"}', media_type="application/json")

    async def ready(self, _: Request) -> Response:
        """200 while some replica that takes requests was heard of within `fresh_s`, some admission
        lets requests in (so the store takes writes), and the gateway is not stopping.
        """
        reason = ""
        if self.draining:
            reason = "shutting down"
        elif not self._fleet.models():
            reason = "no replica has been heard of"
        elif not self._fleet.accepting():
            reason = "no replica takes requests"
        elif not await answers(self._client.bus, "requests", READY_S):
            reason = "no admission lets requests in; can it write to the store?"
        body = msgspec.json.encode({"ready": not reason, "reason": reason})
        return Response(body, status_code=503 if reason else 200, media_type="application/json")

    async def models(self, request: Request) -> Response:
        read_tenant(request.headers, self._rules.keys)
        return Response(
            msgspec.json.encode(ModelList(data=self._models())), media_type="application/json"
        )

    async def model(self, request: Request) -> Response:
        read_tenant(request.headers, self._rules.keys)
        name = request.path_params["model"]
        found = [model for model in self._models() if model.id == name]
        if found:
            return Response(msgspec.json.encode(found[0]), media_type="application/json")
        problem = Problem(
            status=404,
            message="no replica of that model has been heard of",
            code="model_not_found",
            param="model",
        )
        return _response(problem)

    def _models(self) -> list[Model]:
        def context(model: str) -> int | UnsetType:
            return self._fleet.context_tokens(model) or UNSET

        models = [
            Model(id=name, created=int(first_unix_s), max_model_len=context(name))
            for name, first_unix_s in self._fleet.models().items()
        ]
        adapters = self._fleet.adapters().items()
        return models + [
            Model(id=name, created=int(first_unix_s), parent=parent, max_model_len=context(parent))
            for name, (parent, first_unix_s) in adapters
        ]

    async def version(self, _: Request) -> Response:
        body = msgspec.json.encode({"version": version("slackline")})
        return Response(body, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        registries = [self._about, self._registry]
        kind, text = exposition(registries, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    async def chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/chat/completions."""
        await self._serve(CHAT, scope, receive, send)

    async def completions(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/completions."""
        await self._serve(COMPLETIONS, scope, receive, send)

    async def _serve(self, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
        began_unix_s = self._clock.unix_s()
        headers = Headers(scope=scope)
        request_id = new_request_id()  # until the client's own key has been read
        correlation_id = translate.read_correlation_id(headers)
        status = 0
        body = Arriving(receive)
        ignored = ""

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (CORRELATION_ID.encode(), (correlation_id or request_id).encode()),
                    *([(translate.IGNORED.encode(), ignored.encode())] if ignored else []),
                ]
            await send(message)

        held = self._take(1)
        try:
            if self.draining:
                raise Rejected(envelope.SHUTTING_DOWN)
            if self._open > self._cfg.requests_limit:
                raise Rejected(envelope.SATURATED)
            tenant = read_tenant(headers, self._rules.keys)
            request_id = translate.read_request_id(headers)
            raw = await self._bodies.read(headers, body)
            if translate.read_flag(headers, translate.LENIENT, False):
                raw, names = without_unknown(raw, api.kind)
                ignored = ", ".join(ascii(name)[1:-1] for name in names)[:IGNORED_LIMIT].strip()
            formats = self._fleet.holds_formats()
            ask = translate.read_ask(
                headers, api.read(raw), request_id, tenant, self._rules.tiers, held=formats
            )
            held += self._take(len(ask.requests) - 1)
            if self._open > self._cfg.requests_limit:
                raise Rejected(envelope.SATURATED)
            if len(raw) * ask.n > self._cfg.body_limit_bytes:  # every choice carries its prompt
                raise Rejected(envelope.TOO_MANY_COPIES)
            parent = headers.get(telemetry.TRACEPARENT)
            if await self._exchanges.run(ask, parent, body, send_with_id, began_unix_s):
                self._hung_up.add()
        except ClientDisconnect:
            pass  # the client left before it had sent a request
        except Rejected as rejected:
            await _respond(send_with_id, rejected.problem, body)
        except (PeerError, BusError) as error:
            await _respond(send_with_id, envelope.of_error(error), body)
        finally:
            self._take(-held)
            self._responses.labels(str(status)).add()
            self._duration.observe(self._clock.unix_s() - began_unix_s)
        if not body.whole:
            await body.drop()
            await send({"type": "http.response.body"})

    def _take(self, choices: int) -> int:
        """Count so many more as being made."""
        self._open += choices
        self._unfinished.set(self._open)
        return choices


class _Asgi:
    """A callable object: Starlette passes the raw ASGI call to an object, not to a method."""

    def __init__(self, method: ASGIApp) -> None:
        self._method = method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._method(scope, receive, send)


async def _respond(send: Send, problem: Problem, body: Arriving) -> None:
    """Answer a failure. A client whose body was not read to its end may read the answer only after
    it has sent all: its connection stays open for the rest, and closes then.
    """
    content = problem.body()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **({} if body.whole else {"connection": "close"}),
        **problem.headers(),
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": content, "more_body": not body.whole})


async def _refused(_: Request, error: Exception) -> Response:
    """Answers a refusal of the routes that have no body."""
    return _response(
        error.problem
        if isinstance(error, Rejected)
        else envelope.of_error(cast("PeerError", error))
    )


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """Answers 404 and 405 in the envelope."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    problem = Problem(
        status=error.status_code,
        message=f"{request.method} {request.url.path}: {error.detail}",
        code=code,
    )
    return _response(problem, error.headers)


def _response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        problem.body(),
        status_code=problem.status,
        headers={**problem.headers(), **(headers or {})},
        media_type="application/json",
    )
