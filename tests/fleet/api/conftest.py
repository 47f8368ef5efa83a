"""Fixtures of the API tests: a fleet whose engine replays a script, and one with a small model."""

import json
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.fleet.api.scripted import SCRIPT, client_of


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted_fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(SCRIPT))
    environment = {"SLACKLINE_WORKER_SCRIPT": str(script)}
    async with Fleet(FleetSpec(pace=0.1, drain_s=2.0, environment=environment)) as fleet:
        yield fleet
        # no client's message has ended a service
        assert [c.name for c in fleet.processes if c.starts != 1] == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted(scripted_fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(scripted_fleet) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def modelled() -> AsyncIterator[openai.AsyncOpenAI]:
    pytest.importorskip("torch")
    spec = FleetSpec(replicas=1, engine="torch", drain_s=2.0)
    async with Fleet(spec) as fleet, client_of(fleet) as client:
        yield client
