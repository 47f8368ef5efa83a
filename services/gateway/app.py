"""The routes of the gateway, `/ready` and `/metrics` among them. A failure is answered in OpenAI's
envelope, and in Anthropic's under /v1/messages.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from services.gateway import openapi
from services.gateway.api import chats, completions, translate
from services.gateway.api.alive import Fleet, ModelList
from services.gateway.api.asking import UNKNOWN_FIELD, read_leniently
from services.gateway.api.chats import ChatBody
from services.gateway.api.completions import CompletionBody
from services.gateway.api.generation import Generations
from services.gateway.api.messages import frame as messages_frame
from services.gateway.api.messages import messages
from services.gateway.api.messages.messages import CountBody, MessagesBody
from services.gateway.api.responses import responses
from services.gateway.api.responses.responses import ResponseBody
from services.gateway.api.texts import Texts
from services.gateway.batches.asking import BatchAsker
from services.gateway.batches.endpoints import Batches
from services.gateway.batches.file_store import FileStore
from services.gateway.batches.files import Files
from services.gateway.batches.runner import BatchRunner
from services.gateway.batches.store import BatchStore
from services.gateway.clocks import Clocks
from services.gateway.config import GatewayConfig
from services.gateway.console import Console
from services.gateway.http import envelope
from services.gateway.http import headers as request_headers
from services.gateway.http.cross_origin import METHODS, READABLE, CrossOrigin
from services.gateway.http.envelope import Problem, Rejected
from services.gateway.http.guard import read_tenant
from services.gateway.http.json_bytes import encode
from services.gateway.http.request import HttpRequest, HttpRequests, Serve, Written
from services.gateway.http.slo_headers import header_at_fault
from services.gateway.telemetry.gen_ai import GenAi
from shared.bus.api import KeyValue
from shared.bus.objects import Objects
from shared.client.client import Client
from shared.client.ping import answers
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.rules.rules import Rules
from shared.telemetry import telemetry
from shared.telemetry.about import about
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry

LOOK_S = 0.5  # between two looks at the keys
READY_S = 1.0  # for the answer of an admission; it takes 1 ms


class Api(NamedTuple):
    """One of the APIs: its bodies, their reader, the fields that a lenient reader leaves out, and
    its own names of parameters, for errors.
    """

    kind: type[Struct]
    read: Callable[[bytes], CompletionBody | ChatBody]
    ignorable: Mapping[str, tuple[Any, ...]]
    params: Mapping[str, str] = MappingProxyType({})


CHAT = Api(ChatBody, chats.read_body, chats.IGNORABLE)
COMPLETIONS = Api(CompletionBody, completions.read_body, completions.IGNORABLE)
RESPONSES = Api(ResponseBody, responses.read_body, responses.IGNORABLE, responses.PARAMS)
MESSAGES = Api(MessagesBody, messages.read_body, {}, messages.PARAMS)
COUNT = Api(CountBody, messages.read_count, {}, messages.PARAMS)
# what serves the paths of others that end in these names, or in one more after them
INSTEAD = {
    "embeddings": "a server of embeddings",
    **dict.fromkeys(("rerank", "score"), "a server of rerankers"),
    **dict.fromkeys(("images", "audio"), "a server with a multimodal model"),
}


class Stored(NamedTuple):
    batches: KeyValue
    files: Objects


class Gateway:
    """The HTTP application. Set `http_requests.draining` before the listener closes."""

    def __init__(
        self,
        cfg: GatewayConfig,
        rules: Rules,
        client: Client,
        fleet: Fleet,
        clocks: Clocks,
        clock: Clock,
        registry: Registry,
        tracing: telemetry.Tracing,
        gen_ai: GenAi,
        tasks: asyncio.TaskGroup,
        console: Console,
        stored: Stored,
    ) -> None:
        self._console = console
        self._cfg = cfg
        self._rules = rules
        self._client = client
        self._fleet = fleet
        self._clocks, self._clock = clocks, clock
        self._about, self._registry = about("gateway"), registry
        self._generations = Generations(cfg, client, fleet, clock, tracing, gen_ai, tasks)
        self._texts = Texts(client.bus, fleet)
        files, batches = FileStore(stored.files), BatchStore(stored.batches)
        self._files = Files(cfg, files, batches)
        self._batches = Batches(batches, files, clock)
        asker = BatchAsker(self._generations, fleet, rules, clock)
        self.runner = BatchRunner(cfg, client.bus, batches, files, asker, clock, rules)
        self.http_requests = HttpRequests(cfg, clock, registry, rules)

    async def follow_keys(self) -> None:
        """End the answers to each tenant whose last key is revoked, until cancelled."""
        keys = self._rules.keys
        while True:
            await asyncio.sleep(LOOK_S)
            if self._rules.keys is not keys and (keys := self._rules.keys) is not None:
                self._generations.end_all_but(keys.tenants)

    def app(self) -> Starlette:
        cors = Middleware(
            CrossOrigin,
            allow_origins=self._cfg.cors_origins,
            allow_methods=METHODS,
            allow_headers=["*"],
            expose_headers=READABLE,
        )
        app = Starlette(
            middleware=[cors] if self._cfg.cors_origins else [],
            routes=[
                *(
                    Route(path, self.http_requests.route(serve, _failure(path)), methods=[method])
                    for (method, path), serve in self._served().items()
                ),
                Route("/v1/models", self.models, methods=["GET"]),
                Route("/v1/models/{model:path}", self.model, methods=["GET"]),
                Route("/version", self.version, methods=["GET"]),
                Route("/openapi.json", self.openapi, methods=["GET"]),
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
                Exception: _failed,
            },
        )
        app.router.redirect_slashes = False  # to an address made of the client's own Host header
        return app

    def _served(self) -> dict[tuple[str, str], Serve]:
        files, batches = self._files, self._batches
        return {
            ("POST", "/v1/chat/completions"): partial(self._ask, CHAT),
            ("POST", "/v1/completions"): partial(self._ask, COMPLETIONS),
            ("POST", "/v1/responses"): partial(self._ask, RESPONSES),
            ("POST", "/v1/messages"): partial(self._ask, MESSAGES),
            ("POST", "/v1/messages/count_tokens"): self._count,
            ("POST", "/tokenize"): self._texts.tokenize,
            ("POST", "/detokenize"): self._texts.detokenize,
            ("POST", "/v1/files"): files.create,
            ("GET", "/v1/files"): files.list,
            ("GET", "/v1/files/{file_id}"): files.show,
            ("DELETE", "/v1/files/{file_id}"): files.delete,
            ("GET", "/v1/files/{file_id}/content"): files.content,
            ("POST", "/v1/batches"): batches.create,
            ("GET", "/v1/batches"): batches.list,
            ("GET", "/v1/batches/{batch_id}"): batches.show,
            ("POST", "/v1/batches/{batch_id}/cancel"): batches.cancel,
        }

    async def health(self, _: Request) -> Response:
        return Response('{"status":"ok"}', media_type="application/json")

    async def ready(self, _: Request) -> Response:
        """200 while, within `fresh_s`, a replica that takes requests was heard of and an admission
        lets them in, the hosts' clocks agree, and the gateway is not stopping.
        """
        reason = ""
        if self.http_requests.draining:
            reason = "shutting down"
        elif not self._fleet.models():
            reason = "no replica has been heard of"
        elif not self._fleet.accepting():
            reason = "no replica takes requests"
        elif not await answers(self._client.bus, "requests", READY_S):
            reason = "no admission lets requests in; can it write to the store?"
        else:
            reason = self._clocks.off()
        body = encode({"ready": not reason, "reason": reason})
        return Response(body, status_code=503 if reason else 200, media_type="application/json")

    async def models(self, request: Request) -> Response:
        read_tenant(request.headers, self._rules.keys)
        return Response(encode(ModelList(data=self._fleet.listed())), media_type="application/json")

    async def model(self, request: Request) -> Response:
        read_tenant(request.headers, self._rules.keys)
        name = request.path_params["model"]
        found = [model for model in self._fleet.listed() if model.id == name]
        if found:
            return Response(encode(found[0]), media_type="application/json")
        return _response(envelope.no_such_model(name, self._fleet.names()))

    async def version(self, _: Request) -> Response:
        body = encode({"version": version("slackline")})
        return Response(body, media_type="application/json")

    async def openapi(self, _: Request) -> Response:
        return Response(openapi.document(), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        registries = [self._about, self._registry]
        kind, text = exposition(registries, request.headers.get("accept", ""))
        return Response(text, headers={"content-type": kind})

    async def _ask(self, api: Api, http_request: HttpRequest) -> None:
        """Answers a question to a model."""
        headers = http_request.headers
        http_request.request_id = request_headers.read_request_id(headers)
        request_headers.check_names(headers)
        raw = await http_request.read()
        with _refusing(api, headers):
            body = self._body(api, raw, http_request)
            ask = translate.read_ask(
                headers,
                body,
                http_request.request_id,
                http_request.tenant,
                self._rules.tiers,
                self._fleet,
            )
            http_request.hold(len(ask.requests) - 1)
            if len(raw) * ask.n > self._cfg.body_limit_bytes:  # every choice carries its prompt
                raise Rejected(envelope.too_many_copies(self._cfg.body_limit_bytes))
            parent = headers.get(telemetry.TRACEPARENT)
            http_request.hung_up = await self._generations.run(
                ask, parent, http_request.body, http_request.send, http_request.began_unix_s
            )

    async def _count(self, http_request: HttpRequest) -> None:
        """Answers how many tokens messages have."""
        raw = await http_request.read()
        with _refusing(COUNT, http_request.headers):
            body = self._body(COUNT, raw, http_request)
            assert isinstance(body, ChatBody)
            await self._texts.count(http_request, body)

    def _body(self, api: Api, raw: bytes, http_request: HttpRequest) -> CompletionBody | ChatBody:
        """The body, read as leniently as its header, its tenant or the gateway says. Raises
        PeerError.
        """
        named = self._rules.tenants.named(http_request.tenant).lenient
        default = self._cfg.lenient if named is None else named
        lenient = request_headers.read_flag(http_request.headers, request_headers.LENIENT, default)
        try:
            if lenient:
                body, names = read_leniently(api.read, raw, api.kind, api.ignorable)
            else:
                body, names = api.read(raw), []
        except PeerError as error:
            if lenient or error.code != UNKNOWN_FIELD:
                raise
            hint = f"with {request_headers.LENIENT}: true unknown fields are ignored"
            raise PeerError(
                f"{error.message}; {hint}", code=error.code, param=error.param
            ) from None
        http_request.ignore(names + body.ignored)
        return body


def _failure(path: str) -> Written:
    """The form of a failure on this path."""
    return messages_frame.refusal if path.startswith("/v1/messages") else envelope.written


@contextmanager
def _refusing(api: Api, headers: Mapping[str, str]) -> Iterator[None]:
    """Turns a PeerError into a refusal that names the parameter as the API does."""
    try:
        yield
    except PeerError as error:
        problem = envelope.of_error(error)
        param = header_at_fault(headers, problem.param)
        raise Rejected(replace(problem, param=api.params.get(param or "", param))) from error


async def _refused(_: Request, error: Exception) -> Response:
    """Answers a refusal of the routes that have no body."""
    return _response(
        error.problem
        if isinstance(error, Rejected)
        else envelope.of_error(cast("PeerError", error))
    )


async def _failed(*_: object) -> Response:
    """Answers a failure that is a bug of ours; the bug then goes to the log."""
    return _response(Problem(status=500, message="the gateway failed", code="server_error"))


async def _no_such_thing(request: Request, error: Exception) -> Response:
    """Answers 404 and 405 in the envelope."""
    assert isinstance(error, HTTPException)
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    path = request.url.path
    there = {**request.scope, "path": f"/v1{path}"}
    meant = any(route.matches(there)[0] is Match.FULL for route in request.app.routes)
    hint = f"; did you mean /v1{path}?" if meant else ""
    for part in path.split("/")[-2:]:
        if part in INSTEAD:
            hint = f"; this gateway generates text: use {INSTEAD[part]}"
    problem = Problem(
        status=error.status_code,
        message=f"{request.method} {path}: {error.detail}{hint}",
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
