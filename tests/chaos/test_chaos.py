"""Tests of a real fleet with some faults of `make chaos`: afterwards nothing is lost or doubled."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.chaos.endure import endure, on_one_broker, on_three_brokers
from tests.chaos.faults import Arena, of_one_broker, of_three_brokers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SEED = 20_261_123
REQUESTS, DURING_S = 24, 3.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    async with on_one_broker(tmp_path_factory.mktemp("one")) as arena:
        yield arena


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def three(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Arena]:
    async with on_three_brokers(tmp_path_factory.mktemp("three")) as arena:
        yield arena


@pytest.mark.parametrize(
    "fault",
    [
        "kill planner and worker-r1",
        "part admission 1 s",
        "delay planner 0.1 s",
        "skew worker-r1 +1 s",
        "wrong acks of worker-r1",
    ],
)
async def test_the_books_of_a_fleet_on_one_broker_balance_after(
    one: Arena, fault: str, tmp_path: Path
) -> None:
    act = of_one_broker()[fault]
    await endure(one, fault, act, SEED, n=REQUESTS, during_s=DURING_S, out=tmp_path)


@pytest.mark.parametrize("fault", ["kill broker-1", "pause broker-2 1 s"])
async def test_the_books_of_a_fleet_on_three_brokers_balance_after(
    three: Arena, fault: str, tmp_path: Path
) -> None:
    act = of_three_brokers()[fault]
    await endure(three, fault, act, SEED, n=REQUESTS, during_s=DURING_S, out=tmp_path)
