"""The disk of a running fleet fills, and has room again: nothing ends, accepted requests go on."""

import asyncio
from pathlib import Path

import httpx
import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.users import Role, User
from tests.fleet.live import WAIT_S, ask, check, client_of, request_for, until_running
from tests.infra.full_disk import small_disk
from tests.infra.test_health import passes

ADMISSION = User(Role.ADMISSION)
ASKED = {"prompt": 6000 * "x", "max_tokens": 8}  # more than the last page of a file has room for


async def until_ready_is(http: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/ready")).status_code != status:
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_full_disk_stops_nothing_for_good_and_heals_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        # logs and store on the same disk
        spec = FleetSpec(replicas=1, pace=0.5, store=disk.path / "fleet", drain_s=2.0)
        async with (
            Fleet(spec) as fleet,
            client_of(fleet) as (bus, client, wire),
            httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
        ):
            request = request_for(1500, "long")
            running = asyncio.create_task(ask(client, request))
            await until_running(bus, "r1")
            assert await passes(fleet.access(ADMISSION), "requests")
            disk.fill()
            await until_ready_is(http, 503)
            refused = await http.post("/v1/completions", json=ASKED)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "server_is_overloaded",
            )
            async with asyncio.timeout(WAIT_S):
                while await passes(fleet.access(ADMISSION), "requests"):
                    await asyncio.sleep(0.1)
            assert not running.done()
            disk.clear()
            await until_ready_is(http, 200)
            assert (await http.post("/v1/completions", json=ASKED)).status_code == 200
            await check(bus, wire, [await running])
            assert [c.name for c in fleet.processes if c.starts != 1] == ["nats-server"]
            assert not fleet.failed.done()
