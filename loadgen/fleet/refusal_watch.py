"""Tells the user of a fleet that services refuse a changed configuration; else only logs say so."""

import asyncio
import json
from collections.abc import Iterator, Sequence

from loadgen.fleet.child import Child, Say

WATCH_S = 1.0
SAME_S = 5.0  # within which all services look at a changed file


async def tell_refusals(services: Sequence[Child], say: Say) -> None:
    """Say each refusal once for all services that log it; until cancelled."""
    clock = asyncio.get_running_loop().time
    told_at_s = dict[str, float]()
    while True:
        await asyncio.sleep(WATCH_S)
        for why in (why for service in services for why in _refusals(service.fresh_lines())):
            if clock() - told_at_s.get(why, -SAME_S) >= SAME_S:
                told_at_s[why] = clock()
                say(f"the fleet keeps its rules, since the changed configuration is wrong: {why}")


def _refusals(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if '"config.refused"' in line:
            yield json.loads(line)["error"]
