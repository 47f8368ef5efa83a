"""Tests of the backup of docs/operate.md: a copy of the store, made while nothing runs, brings a
fleet back with its batches, files and sums, and with the requests that were still open.
"""

import datetime as dt
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.nats import NatsBus
from shared.schemas import Delta
from shared.store.usage import DaySum, month_sums
from tests.fleet.api.scripted import client_of as http_client_of
from tests.fleet.api.test_batches import begin, ended, line, names, results
from tests.fleet.live import client_of, replay_of, request_for

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SPEC = FleetSpec(pace=0.2, drain_s=1.0)
LINES, TOKENS = 30, 4000


async def test_a_copy_of_the_store_brings_back_batches_files_sums_and_open_requests(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    request, began = request_for(TOKENS, "still-open"), this_month()
    async with (
        Fleet(replace(SPEC, store=first)) as fleet,
        client_of(fleet) as (_, client, _wire),
        http_client_of(fleet, max_retries=20) as http,
    ):
        whole = await ended(http, await begin(http, [line(n) for n in range(LINES)]))
        answers = await http.files.content(whole.output_file_id or "")
        open_batch = await begin(http, [line(n, max_tokens=2000) for n in range(LINES)])
        handle = await client.submit(request, "batch")
        async for event in handle:
            if isinstance(event, Delta) and event.offset > 100:
                break
    shutil.copytree(first, second)
    shutil.rmtree(first)
    async with (
        Fleet(replace(SPEC, store=second)) as fleet,
        client_of(fleet) as (bus, client, _wire),
        http_client_of(fleet, max_retries=20) as http,
    ):
        used = [day for month in {began, this_month()} for day in await days(bus, month)]
        assert sum(day.requests for day in used) >= LINES
        assert await http.batches.retrieve(whole.id) == whole
        assert (await http.files.content(whole.output_file_id or "")).text == answers.text
        open_batch = await ended(http, await http.batches.retrieve(open_batch.id))
        assert names(await results(http, open_batch.output_file_id)) == names(
            [line(n) for n in range(LINES)]
        )
        attached = await client.submit(request, "batch")
        verdict = await attached.wait()
        assert verdict.output_tokens == TOKENS
        replay = await replay_of(bus, request)
        assert len(replay.tokens) == TOKENS


def this_month() -> str:
    return f"{dt.datetime.now(dt.UTC):%Y-%m}"


async def days(bus: NatsBus, month: str) -> list[DaySum]:
    return list((await month_sums(bus.usage, month)).values())
