"""Tests of the sums of what tenants used: each request counts once, whatever the store does."""

import asyncio
import random

import pytest
from msgspec.structs import replace

from shared.bus.nats import connect
from shared.columns import pack
from shared.core.record.verdict import ended
from shared.schemas import Resume, Verdict
from shared.store.usage import WRITERS, DaySum, Usage, month_sums, sum_key
from shared.vocabulary import FinishReason, RequestKey
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import run_virtual

SEEDS = range(40)
BAD = Faults(store_lost=0.15, store_silent=0.2, store_late=0.2)
# the last second of a month, so that the next one is another month's
LAST_UNIX_S = 1_701_388_799.0


def verdict(output_tokens: int, at_unix_s: float = LAST_UNIX_S) -> Verdict:
    record = made.record("t.1", owner="o", attempt=1, prompt_tokens=100, max_tokens=50)
    resume = Resume(tokens=pack([1] * output_tokens))
    found = ended(record, FinishReason.LENGTH, resume, at_unix_s).verdict
    assert found is not None
    return replace(found, ended_unix_s=at_unix_s)


@pytest.mark.parametrize("seed", SEEDS)
def test_writers_that_race_on_a_store_that_loses_answers_count_each_request_once(seed: int) -> None:
    net_rng, rng = random.Random(seed), random.Random(seed + 1)

    async def writes(usage: Usage) -> int:
        added = 0
        for _ in range(8):
            for _ in range(rng.randrange(4)):
                usage.add(RequestKey(f"{rng.choice(('acme', 'other'))}.1"), verdict(5))
                added += 1
            await usage.store()
            await asyncio.sleep(rng.random())
        return added

    async def main() -> None:
        net = SimNet(net_rng, BAD)
        writers = [Usage(net.connect(f"w{n}").usage, f"w{n}") for n in range(3)]
        added = sum(await asyncio.gather(*map(writes, writers)))
        net.faults = Faults()
        await asyncio.sleep(5.0)  # writes that come late
        for writer in writers:
            await writer.store()
        sums = await month_sums(net.connect("reader").usage, "2023-11")
        assert sum(used.requests for used in sums.values()) == added > 0
        assert sum(used.prompt_tokens for used in sums.values()) == 100 * added
        assert sum(used.output_tokens for used in sums.values()) == 5 * added

    run_virtual(main())


async def test_a_month_has_its_own_days_by_tenant_and_no_prompt_without_an_answer(
    nats_url: str,
) -> None:
    async with connect(nats_url, "test") as bus:
        usage = Usage(bus.usage, "w")
        usage.add(RequestKey("acme.1"), verdict(5))
        usage.add(RequestKey("acme.2"), verdict(7, LAST_UNIX_S - 86_400.0))
        usage.add(RequestKey("acme.3"), verdict(9, LAST_UNIX_S + 1.0))
        usage.add(RequestKey("other.1"), verdict(0))
        await usage.store()
        keys = set(await bus.usage.names())
        assert {"2023-11.acme.30", "2023-11.acme.29", "2023-12.acme.01"} <= keys
        november, december = [await month_sums(bus.usage, f"2023-{n}") for n in (11, 12)]
    assert bare(november["acme"]) == DaySum(requests=2, prompt_tokens=200, output_tokens=12)
    assert bare(november["other"]) == DaySum(requests=1)
    assert bare(december["acme"]) == DaySum(requests=1, prompt_tokens=100, output_tokens=9)


def bare(used: DaySum) -> DaySum:
    return replace(used, writers={})


async def test_a_sum_remembers_its_latest_writers_and_no_more(nats_url: str) -> None:
    async with connect(nats_url, "test") as bus:
        for n in range(3 * WRITERS):
            usage = Usage(bus.usage, f"w{n}")
            usage.add(RequestKey("many.1"), verdict(1))
            await usage.store()
        used = (await month_sums(bus.usage, "2023-11"))["many"]
        entry = await bus.usage.get(sum_key("many", LAST_UNIX_S))
    assert used.requests == 3 * WRITERS
    assert entry is not None and len(entry.value) < 1000
    assert list(used.writers) == [f"w{n}" for n in range(2 * WRITERS, 3 * WRITERS)]
