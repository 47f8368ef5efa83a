"""Tests of the turns in which admission reads long texts: they are fair to tenants."""

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from typing import Any

import pytest

from services.admission.intake.reading_turns import HUGE_BYTES, WAIT_S, Turns
from shared.errors import PeerError
from tests.simulated.virtual_loop import run_virtual, virtual

SECOND = 200_000  # bytes that are read in one second; no text of a second is huge
TENANTS = {"a": 1.0, "b": 1.0, "heavy": 3.0}


class Reading:
    """Pretends to read texts in turns; notes when each began and how many were read at once."""

    def __init__(self) -> None:
        self.turns = Turns(2)
        self.began_s: dict[str, list[float]] = defaultdict(list)
        self.at_work = self.most = self.huge = self.most_huge = self.refused = 0

    async def read(self, tenant: str, size: int) -> None:
        try:
            async with self.turns.turn(tenant, TENANTS[tenant], size):
                self.began_s[tenant].append(asyncio.get_running_loop().time())
                self.at_work += 1
                self.huge += size >= HUGE_BYTES
                self.most, self.most_huge = (
                    max(self.most, self.at_work),
                    max(self.most_huge, self.huge),
                )
                await asyncio.sleep(size / SECOND)
                self.at_work -= 1
                self.huge -= size >= HUGE_BYTES
        except PeerError:
            self.refused += 1


async def all_of(reads: list[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for read in reads:
            group.create_task(read)


@virtual()
async def test_a_tenant_waits_for_no_line_of_another() -> None:
    reading = Reading()
    crowd = [reading.read("a", SECOND // 10) for _ in range(100)]
    await all_of([*crowd, reading.read("b", SECOND // 10)])
    assert reading.most == 2
    assert reading.began_s["b"] == [pytest.approx(0.1)]
    assert reading.began_s["a"][-1] > 4.0


def test_tenants_that_wait_have_bytes_read_by_their_weights() -> None:
    async def main() -> Reading:
        reading = Reading()
        await all_of(
            [
                *(reading.read("a", SECOND // 20) for _ in range(80)),
                *(reading.read("b", SECOND // 10) for _ in range(40)),
                *(reading.read("heavy", SECOND // 20) for _ in range(80)),
            ]
        )
        return reading

    began_s = run_virtual(main()).began_s
    by_then = {tenant: sum(at_s < 2.0 for at_s in began_s[tenant]) for tenant in TENANTS}
    assert by_then["heavy"] == pytest.approx(3 * by_then["a"], abs=5)
    assert 2 * by_then["b"] == pytest.approx(by_then["a"], abs=5)


@virtual()
async def test_beside_huge_texts_others_go_on_and_what_waits_too_long_is_refused() -> None:
    reading = Reading()
    huge = [reading.read("a", 3 * SECOND) for _ in range(20)]
    await all_of([*huge, *(reading.read("b", SECOND // 10) for _ in range(10))])
    assert asyncio.get_running_loop().time() == pytest.approx(9.0)
    # what was refused was not read, and its tenant does not pay for it
    await all_of([reading.read("b", SECOND // 10) for _ in range(20)])
    await all_of([reading.read("a", SECOND), *(reading.read("b", SECOND) for _ in range(9))])
    assert (reading.most, reading.most_huge) == (2, 1)
    assert reading.began_s["b"][9] < 1.1
    assert reading.refused == 20 - 3
    assert reading.began_s["a"][:3] == [0.0, 3.0, 6.0]
    assert reading.began_s["a"][3] < 12.0
    assert 6.0 < WAIT_S < 9.0


@virtual()
async def test_a_turn_that_comes_as_its_caller_is_cancelled_goes_to_the_next() -> None:
    turns = Turns(1)

    async def wait() -> None:
        async with turns.turn("a", 1.0, 1):
            pass

    async with turns.turn("a", 1.0, 1):
        gone, stays = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert gone.cancelled()
    await stays
