"""More than a fleet can do: what waits is bounded, the others hear at once when to come back."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.api import RefusedError
from shared.client.client import Client
from shared.schemas import GenerateRequest, Refused, Sampling, Verdict
from tests.fleet.live import WAIT_S, ask, client_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
REQUESTS_S = 80  # a fleet of two does about five of these
FOR_S = 8
PROMPT = [7] * 4000
TIERS = """
name = "impatient"
default = "chat"
[tiers.chat]
slo = { ttft_s = 1.0, tbt_s = 0.1 }
wait_s = 40
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    store: Path = tmp_path_factory.mktemp("overload")
    tiers = store / "tiers.toml"
    tiers.write_text(TIERS)
    async with Fleet(FleetSpec(store=store, tiers=str(tiers), drain_s=2.0)) as fleet:
        yield fleet


def long_one(name: str, importance: float = 1.0) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        token_ids=PROMPT,
        sampling=Sampling(max_tokens=16),
        importance=importance,
    )


async def told(client: Client, request: GenerateRequest) -> Verdict | Refused:
    try:
        handle = await client.submit(request, "chat")
    except RefusedError as error:
        return error.refused
    return await handle.wait()


async def test_a_flood_is_refused_with_a_time_to_come_back_and_all_it_left_ends(
    fleet: Fleet,
) -> None:
    async with client_of(fleet) as (_, client, _), asyncio.timeout(2 * WAIT_S):
        flood, important = [], []
        for n in range(REQUESTS_S * FOR_S):
            flood.append(asyncio.create_task(told(client, long_one(f"flood-{n}"))))
            if n % REQUESTS_S == 0:
                request = long_one(f"important-{n}", importance=2.0)
                important.append(asyncio.create_task(told(client, request)))
            await asyncio.sleep(1 / REQUESTS_S)
        # the fleet is free for others while the flood's best-effort requests wait
        for n in itertools.count():
            short = GenerateRequest(
                request_id=f"after-{n}", prompt="hello", sampling=Sampling(max_tokens=3)
            )
            after = await ask(client, short)
            if after.verdict is not None and not after.verdict.relegated:
                break
        kept, said = await asyncio.gather(*important), await asyncio.gather(*flood)
    refused = [answer for answer in said if isinstance(answer, Refused)]
    served = [answer for answer in said if isinstance(answer, Verdict)]
    assert all(isinstance(verdict, Verdict) for verdict in kept), "an important one was refused"
    assert len(refused) > len(served), "most of it cannot be served in time"
    assert {answer.code for answer in refused} == {"slow_down"}
    assert all(1.0 <= (answer.retry_after_s or 0.0) <= 30.0 for answer in refused)
    assert served, "the fleet works on"


async def test_over_http_an_answer_that_may_not_be_late_is_a_429_or_is_whole(fleet: Fleet) -> None:
    headers = {"x-slackline-allow-relegation": "false"}
    body = {"prompt": "hello " * 700, "max_tokens": 4, "stream": True}

    async def post(client: httpx.AsyncClient) -> tuple[int, str, str]:
        answer = await client.post("/v1/completions", json=body, headers=headers)
        return answer.status_code, answer.headers.get("retry-after", ""), answer.text

    async with httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S) as client:
        answers = await asyncio.gather(*(post(client) for _ in range(60)))
    refused = [retry_after for status, retry_after, _ in answers if status == 429]
    whole = [text for status, _, text in answers if status == 200]
    assert len(refused) + len(whole) == len(answers)
    assert refused
    assert all(1 <= int(retry_after) <= 30 for retry_after in refused)
    assert all(text.endswith("data: [DONE]\n\n") and '"error"' not in text for text in whole)
