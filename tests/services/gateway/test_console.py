"""Tests of the console, the gateway's page of the live fleet: who may see it, and what it shows."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from services.gateway import console
from shared import subjects
from shared.bus.nats import NatsBus, connect
from shared.console.picture import Picture
from shared.errors import BusError, NoResponders
from shared.schemas import Ended, Present
from tests.services.gateway.http.test_guard import keys_in
from tests.services.gateway.site import WITHIN_S, Site, site, until
from tests.shared.console.heard import ended

PATHS = ("/console", "/console/try", "/console/picture", "/console/request?key=a.b")


async def statuses(http: httpx.AsyncClient, **headers: str) -> set[int]:
    return {(await http.get(path, headers=headers)).status_code for path in PATHS}


async def listens(bus: NatsBus) -> bool:
    """Tells whether anybody has subscribed to the ends of requests."""
    try:
        await bus.request(subjects.ENDED, Ended(tier="probe"), Present, timeout_s=0.2)
    except NoResponders:
        return False
    except BusError:
        return True  # it listens, and does not answer
    return True


async def test_without_keys_it_is_open_on_loopback(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        page = await http.get("/", follow_redirects=True)
        assert [answer.status_code for answer in (*page.history, page)] == [307, 200]
        assert page.url.path == "/console"
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert (await http.get("/console/picture")).status_code == 200
        assert (await http.get("/console/request?key=a.b")).status_code == 404
        assert (await http.post("/console")).status_code == 405
        for host in ("localhost", "localhost:8080", "127.0.0.1", "[::1]", "[::1]:8080"):
            assert (await http.get("/console", headers={"host": host})).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example:80"},
        {"host": "10.0.0.7"},
        {"host": "[::1.evil.example"},
        {"host": "[fe80::1]:8080"},
        {"host": "127.0.0.1", "x-forwarded-for": "10.0.0.7"},
        {"host": "127.0.0.1", "forwarded": "for=10.0.0.7"},
    ],
)
async def test_a_page_of_another_site_and_a_proxy_are_refused(
    nats_url: str, headers: dict[str, str]
) -> None:
    async with site(nats_url) as at, at.http() as http:
        assert await statuses(http, **headers) == {403}
        assert (await http.get("/health", headers=headers)).status_code == 200


async def test_beside_keys_it_is_off_and_no_tenants_key_opens_it(
    nats_url: str, tmp_path: Path
) -> None:
    key = keys_in(tmp_path / "keys", "acme")["acme"]
    async with site(nats_url, keys=str(tmp_path / "keys")) as at, at.http() as http:
        for headers in ({}, {"authorization": f"Bearer {key}"}):
            assert await statuses(http, **headers) == {404}
        assert "CONSOLE_KEYS" in (await http.get("/console")).json()["error"]["message"]
        front = await http.get("/", follow_redirects=True)  # leads to what can be called
        assert "/v1/chat/completions" in front.json()["paths"]


async def test_where_everybody_is_served_without_keys_a_browser_on_the_machine_may_look(
    nats_url: str,
) -> None:
    async with site(nats_url, without_keys=True) as at, at.http() as http:
        assert await statuses(http) == {200, 404}
        for stranger in ({"host": "10.0.0.7"}, {"host": "localhost", "via": "1.1 proxy"}):
            assert await statuses(http, **stranger) == {403}


async def test_with_console_keys_it_wants_one_of_them(nats_url: str, tmp_path: Path) -> None:
    tenant = keys_in(tmp_path / "keys", "acme")["acme"]
    operator = keys_in(tmp_path / "operators", "ann")["ann"]
    files = {"keys": str(tmp_path / "keys"), "console_keys": str(tmp_path / "operators")}
    async with site(nats_url, **files) as at, at.http() as http:
        answer = await http.get("/console")
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Basic realm=")  # a browser asks
        for wrong in (tenant, operator[:-1], "x", 5000 * "x"):
            assert await statuses(http, authorization=f"Bearer {wrong}") == {401}
            basic = httpx.BasicAuth("ann", wrong)
            assert (await http.get("/console/picture", auth=basic)).status_code == 401
        for odd in ("Bearer", "Basic", "Basic ???", "Basic /////w==", "Negotiate abc"):
            assert await statuses(http, authorization=odd) == {401}
        assert await statuses(http, authorization=f"Bearer {operator}") == {200, 404}
        for user in ("ann", "anybody", ""):
            basic = httpx.BasicAuth(user, operator)
            for host in ({}, {"host": "console.example"}):
                answer = await http.get("/console/picture", auth=basic, headers=host)
                assert answer.status_code == 200
        # it opens the console, and nothing else
        models = await http.get("/v1/models", headers={"authorization": f"Bearer {operator}"})
        assert models.status_code == 401


async def test_the_page_may_run_nothing_but_itself(nats_url: str) -> None:
    async with site(nats_url) as at, at.http() as http:
        pages = [await http.get(path) for path in console.PAGES]
    for page in pages:
        policy = dict(
            part.strip().partition(" ")[::2]
            for part in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'none'"
        assert policy["connect-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["script-src"].startswith("'sha256-") and "unsafe" not in str(policy)
        assert "//" not in page.text.replace("// ", "").replace("http://www.w3.org", "")


async def picture_of(at: Site) -> Picture:
    async with at.http() as http:
        answer = await http.get("/console/picture")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    return msgspec.json.decode(answer.content, type=Picture)


async def test_nothing_is_listened_to_until_somebody_looks_and_after_nobody_does(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "UNWATCHED_S", 0.5)
    async with connect(nats_url, "probe") as bus, site(nats_url) as at:
        async with at.http() as http:
            await http.get("/console")  # the page alone listens to nothing
        assert not await listens(bus)
        await picture_of(at)
        assert await listens(bus)
        async with asyncio.timeout(WITHIN_S):
            while await listens(bus):
                await asyncio.sleep(0.05)
        await picture_of(at)  # and again
        assert await listens(bus)


async def test_it_shows_what_the_fleet_says(nats_url: str) -> None:
    async with connect(nats_url, "fleet") as bus, site(nats_url) as at:
        assert "chat" in {tier.name for tier in (await picture_of(at)).tiers}
        await at.fleet.digest()
        for n in range(10):
            await bus.publish(subjects.ENDED, ended(f"acme.{n}", met=n < 9))
        await bus.flush(WITHIN_S)
        found: list[Picture] = []

        async def look() -> None:
            async with asyncio.timeout(WITHIN_S):
                while not found or not found[-1].replicas:
                    found.append(await picture_of(at))

        await look()
        [replica] = found[-1].replicas
        assert (replica.name, replica.model) == ("r0", "stand-in")
        chat = next(tier for tier in found[-1].tiers if tier.name == "chat")
        assert (chat.offered, chat.met) == (10, 9)
        async with at.http() as http:
            life = (await http.get("/console/request?key=acme.9")).json()
            assert (life["tier"], life["slo_met"], life["missed"]) == ("chat", False, "ttft")
            for bad in ("since=x", "since=-1", "since=1e9", f"since={10 * '9999'}", "since=²"):
                assert (await http.get(f"/console/picture?{bad}")).status_code == 400


async def test_a_gateway_that_is_watched_stops_in_order(nats_url: str) -> None:
    async with site(nats_url) as at:
        await picture_of(at)
        at.stop.set()
        await until(at.serving.done)
        at.serving.result()
