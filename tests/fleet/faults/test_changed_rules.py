"""Tests of a changed configuration file: a live fleet takes the changes without a restart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.fleet.refusal_watch import WATCH_S
from shared.bus.api import RefusedError
from shared.rules.http_keys import line_of, new_key
from shared.schemas import GenerateRequest, Sampling
from shared.store.records import Records
from shared.subjects import request_key
from shared.vocabulary import Slo
from tests.fleet.live import WAIT_S, ask, client_of, request_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
BEFORE = """
[tiers.chat]
slo = { ttft_s = 5.0, tbt_s = 1.0 }
[tenants.default]
importance = 2.0
weight = 3.0
slo = { ttft_s = 1.0 }
[tenants.small]
tokens_s = 1
burst_tokens = 100
"""
NIGHTLY = """
[tiers.nightly]
slo = { ttlt_s = 3600 }
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("configured") / "slackline.toml"
    file.write_text(BEFORE)
    return file


@pytest.fixture(scope="module")
def said() -> list[str]:
    """The lines that the fleet's services have logged."""
    return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(file: Path, said: list[str]) -> AsyncIterator[Fleet]:
    spec = FleetSpec(replicas=1, pace=0.2, drain_s=2.0, environment={"SLACKLINE_CONFIG": str(file)})
    async with Fleet(spec, said.append) as fleet:
        yield fleet


def request(name: str) -> GenerateRequest:
    return GenerateRequest(request_id=name, prompt="x", sampling=Sampling(max_tokens=2))


async def a_new_tier_is_taken_and_what_was_sent_before_goes_on(fleet: Fleet, file: Path) -> None:
    async with client_of(fleet) as (bus, client, _), asyncio.timeout(WAIT_S):
        with pytest.raises(RefusedError, match="unknown tier `nightly`"):
            await client.submit(request("a"), "nightly")
        slow = request_for(400, "b", prompt="x")
        under_way = asyncio.create_task(ask(client, slow, "chat"))
        await ask(client, replace(request("important"), importance=1000.0), "chat")
        stored = await Records(bus.requests, bus.bodies).get(request_key("default", "important"))
        assert stored is not None
        assert (stored.record.importance, stored.record.weight) == (2.0, 3.0)
        with pytest.raises(RefusedError, match="may ask for a ttft_s of 1 s or more"):
            await client.submit(replace(request("tight"), slo=Slo(ttft_s=0.5)), "chat")
        file.write_text(BEFORE + NIGHTLY)
        while True:
            try:
                handle = await client.submit(request("c"), "nightly")
                break
            except RefusedError:
                await asyncio.sleep(0.1)
        assert (await handle.wait()).slo_met
        assert len((await under_way).tokens) == 400


async def a_tenant_that_had_its_tokens_is_told_when_to_come_back(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, _):
        asked = GenerateRequest(
            token_ids=[7] * 50, sampling=Sampling(max_tokens=100), tenant="small", request_id="e"
        )
        await ask(client, asked)
        with pytest.raises(RefusedError, match="tenant small is over its limit of") as caught:
            await client.submit(replace(asked, request_id="f"), "chat")
    assert caught.value.refused.code == "rate_limit_exceeded"
    assert (
        1.0 <= (caught.value.refused.retry_after_s or 0.0) <= 51.0
    )  # 150 - 100 tokens, in whole s


async def a_wrong_file_changes_nothing_and_is_told_once(
    fleet: Fleet, file: Path, said: list[str]
) -> None:
    file.write_text("[tiers.chat]\nslo = {}\n")
    async with client_of(fleet) as (_, client, _), asyncio.timeout(WAIT_S):
        for service in (fleet.process("admission"), fleet.process("gateway")):
            while "config.refused" not in service.output():
                await asyncio.sleep(0.1)
        assert (await ask(client, request("d"), "nightly")).verdict is not None
        await asyncio.sleep(2 * WATCH_S)
    (line,) = said
    assert line.startswith("the fleet keeps its rules, since the changed configuration is wrong: ")
    assert line.endswith("tier `chat` has an SLO without any bound")


async def a_key_and_its_revocation_count_without_a_restart(fleet: Fleet, file: Path) -> None:
    first, second = new_key(), new_key()
    hashes = [line_of("acme", key).split()[1] for key in (first, second)]

    def write(*keys: str) -> None:
        file.write_text(f"[tenants.acme]\nkeys = {list(keys)}\n{BEFORE}")

    async with httpx.AsyncClient(base_url=fleet.http_url) as http, asyncio.timeout(WAIT_S):

        async def status(key: str) -> int:
            answer = await http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        assert (await http.get("/v1/models")).status_code == httpx.codes.OK
        write(*hashes)
        while (await http.get("/v1/models")).status_code != httpx.codes.UNAUTHORIZED:
            await asyncio.sleep(0.1)
        assert [await status(key) for key in (first, second, new_key())] == [200, 200, 401]
        write(hashes[1])
        while await status(first) != httpx.codes.UNAUTHORIZED:
            await asyncio.sleep(0.1)
        assert await status(second) == httpx.codes.OK


async def test_changes_count_on_a_fleet_that_runs(
    fleet: Fleet, file: Path, said: list[str]
) -> None:
    """The changes come one after the other: each begins with the file that the last one left."""
    await a_new_tier_is_taken_and_what_was_sent_before_goes_on(fleet, file)
    await a_tenant_that_had_its_tokens_is_told_when_to_come_back(fleet)
    await a_wrong_file_changes_nothing_and_is_told_once(fleet, file, said)
    await a_key_and_its_revocation_count_without_a_restart(fleet, file)
