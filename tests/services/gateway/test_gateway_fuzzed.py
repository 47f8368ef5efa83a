"""Fuzz tests of the gateway: it answers any body, header or path in OpenAI's form, and goes on."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import pytest
from hypothesis import given

from services.gateway.api.chats import ChatBody
from services.gateway.api.completions import CompletionBody
from services.gateway.api.messages.messages import MessagesBody
from services.gateway.http.headers import APPLICATION, CORRELATION_ID, IDEMPOTENCY_KEY, TIER_HEADERS
from services.gateway.http.slo_headers import SLO_HEADERS
from tests.generated import ODD, encoded, fuzzed, near, seeds, tampered, valid
from tests.services.gateway.site import WITHIN_S, site, sse

BODIES: dict[str, Any] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/messages": MessagesBody,
}
HEADERS = [
    IDEMPOTENCY_KEY, CORRELATION_ID, APPLICATION, *TIER_HEADERS,
    *(h for names in SLO_HEADERS.values() for h in names),
    "x-llm-d-inference-fairness-id", "x-slackline-allow-relegation", "authorization", "traceparent",
    "content-type", "accept",
]  # fmt: skip
PATHS = (
    "/v1/models",
    "/v1/models/",
    "/health",
    "/ready",
    "/metrics",
    "/",
    "/v1",
    "/v2/completions",
)


@pytest.fixture(scope="module")
def url(nats_url: str) -> Iterator[str]:
    """A gateway with its stand-in for the fleet, on a loop in a thread of its own."""
    address: list[str] = []
    began, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def run() -> None:
        async with site(nats_url, requests_limit=64, fresh_s=3600.0) as at:  # one digest
            address.append(at.url)
            began.set()
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    assert began.wait(WITHIN_S)
    yield address[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(WITHIN_S)
    assert not thread.is_alive()
    loop.close()


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=WITHIN_S, trust_env=False) as client:
        yield client


def judge(answer: httpx.Response) -> None:
    """Check that an answer is whole, or an error with a status that its client caused."""
    if answer.status_code == 200:
        if answer.headers["content-type"].startswith("text/event-stream"):
            events = sse(answer.text)
            last = events[-1]
            assert last == "[DONE]" or "error" in last or last == {"type": "message_stop"}
        elif answer.headers["content-type"] == "application/json":
            answer.json()
        return
    assert 400 <= answer.status_code < 500, answer.text
    body = answer.json()
    error = body["error"]
    assert error["message"]
    if "request_id" in body:  # in Anthropic's form
        assert (set(body), set(error)) == ({"type", "error", "request_id"}, {"type", "message"})
        return
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"]


def body_of(kind: Any, rng: Random) -> bytes:
    made = (valid if rng.random() < 0.3 else near)(kind, rng, json=True)
    if isinstance(made, dict) and isinstance(made.get("max_tokens"), int):
        made["max_tokens"] = min(made["max_tokens"], 8)
    raw = encoded(made, lambda value: json.dumps(value).encode())
    return tampered(raw, rng) if rng.random() < 0.2 else raw


def header_of(rng: Random) -> bytes:
    value = rng.choice([str(rng.choice(ODD)).encode(errors="replace"), rng.randbytes(12)])
    return bytes(byte for byte in value if byte >= 32 and byte != 127).strip()


@pytest.mark.parametrize("path", BODIES)
@fuzzed
@given(rng=seeds)
def test_any_body_with_any_header_is_answered_in_openais_form(
    http: httpx.Client, path: str, rng: Random
) -> None:
    names = rng.sample(HEADERS, rng.randint(0, 3))
    headers = [(name.encode(), header_of(rng)) for name in names]
    answer = http.post(path, content=body_of(BODIES[path], rng), headers=headers)
    judge(answer)
    assert answer.headers["x-request-id"]


@fuzzed
@given(rng=seeds)
def test_any_path_and_method_is_answered_in_openais_form(http: httpx.Client, rng: Random) -> None:
    tail = "".join(rng.choices(["a", "/", "%", "2f", ".", "?", "&=", "%ff"], k=rng.randint(0, 8)))
    path = f"{rng.choice((*PATHS, *BODIES))}{tail}".encode()
    method = rng.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "BREW"])
    answer = http.request(method, http.base_url.copy_with(raw_path=path), content=rng.randbytes(9))
    if answer.status_code == 307:  # the way to the page of the console
        assert path.split(b"?")[0] == b"/" and answer.headers["location"] == "/console"
    else:
        judge(answer)


@fuzzed
@given(rng=seeds)
def test_bytes_that_are_not_http_end_their_connection_alone(url: str, rng: Random) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'Content-Length: 31\r\n\r\n{"prompt":"hello","max_tokens":1}'
    )
    with socket.create_connection((host, int(port)), timeout=WITHIN_S) as connection:
        connection.sendall(tampered(request, rng))
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:
            pass  # what is left of the bytes was not read
    assert b"500" not in answer.split(b"\r\n")[0]


def test_the_gateway_still_serves_after_all_that(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == " w0 w1"
    unfinished = [
        line
        for line in http.get("/metrics").text.splitlines()
        if line.startswith("slackline_gateway_unfinished_requests")
    ]
    assert unfinished == ["slackline_gateway_unfinished_requests 0"]
