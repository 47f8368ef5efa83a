"""Runs a gateway for tests: real HTTP, a real bus, and a stand-in for the fleet behind it."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from services.gateway.config import GatewayConfig
from services.gateway.service import listen, serve
from shared import subjects
from shared.bus.nats import connect
from shared.schemas import GenerateRequest
from shared.telemetry.telemetry import Tracing
from shared.vocabulary import RequestKey
from tests.services.gateway.standin_fleet import StandIn, standing_in

WITHIN_S = 60.0  # the longest that a busy machine may take for anything
PATIENT = {"submit_s": WITHIN_S, "fresh_s": WITHIN_S, "drain_s": 2.0}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=WITHIN_S, trust_env=False)


@dataclass
class Site:
    """A running gateway and its stand-in for the fleet, with clients for the gateway."""

    url: str
    fleet: StandIn
    stop: asyncio.Event
    serving: asyncio.Task[None]
    client: httpx.AsyncClient

    def http(self) -> httpx.AsyncClient:
        """A client with connections of its own."""
        return client_of(self.url)

    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WITHIN_S
        )

    async def post(
        self, path: str, body: Any, key: str | None = None, **headers: str
    ) -> httpx.Response:
        """Post to /v1/`path`, with `key` as idempotency key; `_` in names of headers is `-`."""
        return await self.client.post(f"/v1/{path}", **_sent(body, key, headers))

    def stream(
        self, path: str, body: Any, key: str | None = None, **headers: str
    ) -> AbstractAsyncContextManager[httpx.Response]:
        sent = _sent(body | {"stream": True}, key, headers)
        return self.client.stream("POST", f"/v1/{path}", **sent)

    def request(self, key: str, tenant: str = "default") -> GenerateRequest:
        """The request that reached the fleet."""
        return self.fleet.asked[key_of(key, tenant)].request

    async def until_metrics(self, line: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while line not in (await self.client.get("/metrics")).text:
                await asyncio.sleep(0.02)


def _sent(body: Any, key: str | None, headers: dict[str, str]) -> dict[str, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        named["idempotency-key"] = key
    return {"content" if isinstance(body, bytes) else "json": body, "headers": named}


@contextlib.asynccontextmanager
async def gateway(
    nats_url: str, **settings: Any
) -> AsyncIterator[tuple[str, asyncio.Event, asyncio.Task[None]]]:
    """Serve a gateway on a free port: its URL, the event that stops it, and its task."""
    tracing = settings.pop("tracing", Tracing())
    cfg = GatewayConfig(url=nats_url, port=0, **{**PATIENT, **settings})
    listener, stop = listen(cfg), asyncio.Event()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(serve(cfg, listener, stop, tracing))
    try:
        async with client_of(url) as http:
            assert (await http.get("/health")).status_code == 200
        yield url, stop, serving
    finally:
        stop.set()
        await serving


@contextlib.asynccontextmanager
async def site(nats_url: str, **settings: Any) -> AsyncIterator[Site]:
    """Serve a gateway, and a stand-in for the fleet behind it, until the end of the block."""
    async with (
        connect(nats_url, "stand-in") as bus,
        standing_in(bus) as fleet,
        gateway(nats_url, **settings) as (url, stop, serving),
        client_of(url) as client,
    ):
        if settings.get("fresh_s", WITHIN_S) >= WITHIN_S:
            await until_heard(fleet, client)
        yield Site(url, fleet, stop, serving, client)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def until_heard(fleet: StandIn, http: httpx.AsyncClient) -> None:
    """Publish digests until the gateway, which listens now and then, has heard one."""
    async with asyncio.timeout(WITHIN_S):
        while (await http.get("/ready")).status_code != httpx.codes.OK:
            await fleet.digest()
            await asyncio.sleep(0.02)


async def until_status(http: httpx.AsyncClient, path: str, status: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while (await http.get(path)).status_code != status:
            await asyncio.sleep(0.02)


def new_id() -> str:
    return uuid.uuid4().hex


def key_of(request_id: str, tenant: str = "default") -> RequestKey:
    return subjects.request_key(tenant, request_id)


def sse(raw: str) -> list[Any]:
    """Decode the `data:` events; [DONE] stays itself."""
    found = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def replies_in(answer: httpx.Response) -> list[Any]:
    """The chunks of a stream but [DONE], or the one whole answer."""
    streamed = answer.headers["content-type"].startswith("text/event-stream")
    return sse(answer.text)[:-1] if streamed else [answer.json()]
