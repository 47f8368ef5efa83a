"""Tests of the gateway's API keys and TLS, with the OpenAI client: who is let in, and as whom."""

import asyncio
import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from structlog.testing import capture_logs

from services.gateway.config import GatewayConfig
from services.gateway.service import listen, serve
from shared.bus.nats import connect
from shared.errors import ConfigError
from shared.process.configuration import load
from shared.rules import http_keys
from shared.telemetry.telemetry import Tracing
from tests.self_signed import certificate_in
from tests.services.gateway.site import WITHIN_S, key_of, new_id, site, until_heard
from tests.services.gateway.standin_fleet import MODEL, standing_in

ASKED: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


def keys_in(path: Path, *tenants: str) -> dict[str, str]:
    """Write a file of keys, one for each tenant."""
    made = {tenant: http_keys.new_key() for tenant in tenants}
    path.write_text("".join(http_keys.line_of(tenant, key) for tenant, key in made.items()))
    return made


def openai_of(url: str, key: str, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=WITHIN_S, **settings
    )


async def test_a_request_is_its_keys_tenants_whatever_it_says(
    nats_url: str, tmp_path: Path
) -> None:
    made = keys_in(tmp_path / "keys", "acme", "umbrella")
    async with site(nats_url, keys=str(tmp_path / "keys")) as at:
        for tenant, key in made.items():
            request_id = new_id()
            named = {"idempotency-key": request_id}
            async with openai_of(at.url, key) as client:
                await client.completions.create(**ASKED, extra_headers=named)
                assert key_of(request_id, tenant) in at.fleet.asked
                assert [model.id async for model in client.models.list()] == [MODEL]
        claimed = {"idempotency-key": new_id(), "x-llm-d-inference-fairness-id": "acme"}
        async with openai_of(at.url, made["acme"]) as client:
            await client.completions.create(**ASKED, extra_headers=claimed)
        async with openai_of(at.url, made["umbrella"]) as client:
            with pytest.raises(openai.PermissionDeniedError) as caught:
                await client.completions.create(
                    **ASKED, extra_headers={**claimed, "idempotency-key": new_id()}
                )
            assert caught.value.code == "permission_denied"
        assert {str(key).partition(".")[0] for key in at.fleet.asked} == {"acme", "umbrella"}


async def test_without_a_key_or_with_a_wrong_one_the_openai_client_is_not_authenticated(
    nats_url: str, tmp_path: Path
) -> None:
    key = keys_in(tmp_path / "keys", "acme")["acme"]
    async with site(nats_url, keys=str(tmp_path / "keys")) as at:
        for wrong in ("sk-wrong", key[:-1], f"{key}x", key.upper(), 10_000 * "x"):
            async with openai_of(at.url, wrong) as client:
                with pytest.raises(openai.AuthenticationError) as caught:
                    await client.completions.create(**ASKED)
                assert caught.value.code == "invalid_api_key"
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
                with pytest.raises(openai.AuthenticationError):
                    await client.models.list()
        async with at.http() as http:
            for value in ("", "Bearer", f"Basic {key}", key, f"Bearer  x {key}"):
                for ask in (
                    http.build_request("POST", "/v1/completions", json=ASKED),
                    http.build_request("POST", "/v1/chat/completions", content=b"{"),
                    http.build_request("GET", "/v1/models"),
                    http.build_request("GET", f"/v1/models/{MODEL}"),
                ):
                    ask.headers["authorization"] = value
                    answer = await http.send(ask)
                    assert answer.status_code == 401, (value, ask.url)
                    assert answer.json()["error"]["code"] == "invalid_api_key"
            for free in ("/health", "/ready", "/metrics"):
                assert (await http.get(free)).status_code == 200
        assert not at.fleet.asked


async def test_what_runs_for_a_tenant_ends_once_its_last_key_is_revoked(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is replaced ends nothing, nor one of another tenant."""
    path = tmp_path / "keys"
    monkeypatch.setenv("SLACKLINE_GATEWAY_KEYS", str(path))  # a changed file is read by it
    made = keys_in(path, "acme", "umbrella")
    async with (
        asyncio.timeout(WITHIN_S),
        site(nats_url, keys=str(path)) as at,
        openai_of(at.url, made["acme"]) as acme,
        openai_of(at.url, made["umbrella"]) as umbrella,
    ):
        hang = ASKED | {"prompt": "hang", "stream": True}
        revoked, kept = [await client.completions.create(**hang) for client in (acme, umbrella)]
        whole = asyncio.create_task(acme.completions.create(**ASKED | {"prompt": "wait"}))
        assert (await anext(revoked)).choices[0].text == " w0"
        assert (await anext(kept)).choices[0].text == " w0"
        while len(at.fleet.asked) < 3:
            await asyncio.sleep(0.01)
        keys_in(path, "umbrella")
        with pytest.raises(openai.APIError) as ended:
            await anext(revoked)
        assert ended.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await whole
        while len(at.fleet.cancels) < 2:
            await asyncio.sleep(0.01)
        assert {str(key).partition(".")[0] for key in at.fleet.cancels} == {"acme"}
        await kept.close()


def test_without_keys_only_loopback_is_served_unless_that_is_asked_for() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert load(GatewayConfig, "gateway", {"SLACKLINE_GATEWAY_HOST": host}).host == host
    for host in ("0.0.0.0", "::", "10.0.0.1", "gateway.example"):
        env = {"SLACKLINE_GATEWAY_HOST": host}
        with pytest.raises(ConfigError, match="slackline key TENANT FILE"):
            load(GatewayConfig, "gateway", env)
        load(GatewayConfig, "gateway", env | {"SLACKLINE_GATEWAY_KEYS": "keys"})
        load(GatewayConfig, "gateway", env | {"SLACKLINE_GATEWAY_WITHOUT_KEYS": "true"})


# ---------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, and its key."""
    return certificate_in(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@contextlib.asynccontextmanager
async def tls_gateway(nats_url: str, **settings: Any) -> AsyncIterator[str]:
    cfg = GatewayConfig(
        url=nats_url, port=0, fresh_s=WITHIN_S, submit_s=WITHIN_S, drain_s=2.0, **settings
    )
    listener, stop = listen(cfg), asyncio.Event()
    serving = asyncio.create_task(serve(cfg, listener, stop, Tracing()))
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        await serving


async def test_the_openai_client_speaks_tls_with_a_key_and_trusts_no_stranger(
    nats_url: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, cert_key = certificate
    key = keys_in(tmp_path / "keys", "acme")["acme"]
    async with (
        connect(nats_url, "stand-in") as bus,
        standing_in(bus) as fleet,
        tls_gateway(
            nats_url, keys=str(tmp_path / "keys"), tls_cert=str(cert), tls_key=str(cert_key)
        ) as url,
    ):
        trusting = ssl.create_default_context(cafile=str(cert))
        async with (
            httpx.AsyncClient(verify=trusting, trust_env=False, base_url=url) as http,
            openai_of(url, key, http_client=http) as client,
        ):
            await until_heard(fleet, http)
            answer = await client.completions.create(**ASKED)
            assert answer.choices[0].text == " w0 w1"
            stream = await client.completions.create(**ASKED, stream=True)
            assert "".join([c.choices[0].text async for c in stream if c.choices]) == " w0 w1"
        async with httpx.AsyncClient(trust_env=False) as stranger:
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx.RemoteProtocolError):
                await stranger.get(f"{url.replace('https', 'http')}/health")


def shown_by(url: str) -> bytes:
    """The certificate that a new connection is shown, in DER."""
    host, port = url.removeprefix("https://").split(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port))))


async def test_a_new_certificate_is_shown_to_new_connections_while_old_ones_go_on(
    nats_url: str, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = (Path(shutil.copy(file, tmp_path)) for file in certificate)
    (tmp_path / "new").mkdir()
    new_cert, new_key = certificate_in(tmp_path / "new", "IP:127.0.0.1")
    first, second = (ssl.PEM_cert_to_DER_cert(file.read_text()) for file in (cert, new_cert))

    async def until_shown(url: str, wanted: bytes) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await asyncio.to_thread(shown_by, url) != wanted:
                await asyncio.sleep(0.1)

    async with (
        tls_gateway(nats_url, tls_cert=str(cert), tls_key=str(key)) as url,
        httpx.AsyncClient(verify=ssl.create_default_context(cafile=cert), trust_env=False) as http,
    ):
        assert (await http.get(f"{url}/health")).status_code == 200
        assert await asyncio.to_thread(shown_by, url) == first
        with capture_logs() as logs:
            shutil.copy(new_cert, cert)  # its key is missing yet
            async with asyncio.timeout(WITHIN_S):
                while not any(line["event"] == "certificate.refused" for line in logs):
                    await asyncio.sleep(0.1)
        assert await asyncio.to_thread(shown_by, url) == first
        shutil.copy(new_key, key)
        await until_shown(url, second)
        # the connection from before goes on: a new one would not be trusted
        assert (await http.get(f"{url}/health")).status_code == 200


async def test_a_certificate_that_cannot_be_used_stops_the_start(
    tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    odd, absent = tmp_path / "odd", tmp_path / "absent"
    odd.write_text("no certificate")
    for pair in ((absent, key), (odd, key), (cert, odd)):
        cfg = GatewayConfig(port=0, tls_cert=str(pair[0]), tls_key=str(pair[1]))
        with listen(cfg) as listener, pytest.raises(ConfigError, match=str(pair[0])):
            await serve(cfg, listener, asyncio.Event(), Tracing())
    with pytest.raises(ConfigError, match="come together"):
        load(GatewayConfig, "gateway", {"SLACKLINE_GATEWAY_TLS_CERT": str(cert)})
