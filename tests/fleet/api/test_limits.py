"""The limits of tenants, on a live fleet."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.api import RefusedError
from shared.schemas import GenerateRequest, Sampling
from shared.store.records import Records
from shared.subjects import request_key
from shared.vocabulary import Slo
from tests.fleet.live import ask, client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = """
[tenants.small]
tokens_s = 1
burst_tokens = 100
importance = 2.0
weight = 3.0
slo = { ttft_s = 0.5 }
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    store: Path = tmp_path_factory.mktemp("limits")
    tenants = store / "tenants.toml"
    tenants.write_text(LIMITS)
    environment = {"SLACKLINE_ADMISSION_TENANTS": str(tenants)}
    async with Fleet(
        FleetSpec(
            replicas=1, gateway=False, pace=0.2, store=store, drain_s=2.0, environment=environment
        )
    ) as fleet:
        yield fleet


def small(name: str, **more: object) -> GenerateRequest:
    values = {"token_ids": [7] * 50, "sampling": Sampling(max_tokens=100), "tenant": "small"}
    return GenerateRequest(request_id=name, **{**values, **more})  # type: ignore[arg-type]


async def test_importance_and_weight_are_those_of_the_file(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, _):
        await ask(client, small("a", importance=1000.0, sampling=Sampling(max_tokens=1)))
        stored = await Records(bus.requests, bus.bodies).get(request_key("small", "a"))
    assert stored is not None
    assert (stored.record.importance, stored.record.weight) == (2.0, 3.0)


async def test_a_tighter_slo_than_allowed_is_refused(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, _):
        with pytest.raises(RefusedError, match=r"ttft_s of 0\.5 s or more") as caught:
            await client.submit(small("b", slo=Slo(ttft_s=0.4)), "chat")
    refused = caught.value.refused
    assert (refused.code, refused.param) == ("permission_denied", "slo.ttft_s")


async def test_a_tenant_that_had_its_tokens_is_told_when_to_come_back_and_others_are_not(
    fleet: Fleet,
) -> None:
    async with client_of(fleet) as (_, client, _):
        await ask(client, small("c"))  # 150 tokens, in the mean
        with pytest.raises(RefusedError, match="has had its tokens") as caught:
            await client.submit(small("d"), "chat")
        other = small("e", tenant="default")
        assert (await ask(client, other)).verdict is not None
    assert caught.value.refused.code == "slow_down"
    # at most "a" and "c" without a second in between, less the burst: 51 + 150 - 100 tokens
    assert 1.0 <= (caught.value.refused.retry_after_s or 0.0) <= 101.0
