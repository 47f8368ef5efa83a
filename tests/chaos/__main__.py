"""Runs `make chaos`: every fault on a fleet with one broker and on one with three; ten minutes.

Prints a line for each, and writes timelines and the table to out/chaos. `--only TEXT` does the
faults whose name has this text; `--seed` draws the load.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.endure import Outcome, endure, on_one_broker, on_three_brokers
from tests.chaos.faults import of_one_broker, of_three_brokers
from tests.chaos.table import HEAD, row, write
from tests.infra.full_disk import small_disk

OUT = Path("out/chaos")
REQUESTS, DURING_S = 60, 6.0


async def main(only: str, seed: int) -> int:
    broken: list[str] = []
    tables: dict[str, list[Outcome]] = {}
    print(*HEAD, sep="\n")
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder) / "disk") as disk:
        for where, faults, arena_at in (
            ("one broker", of_one_broker(), on_one_broker(disk.path / "fleet", disk)),
            ("three brokers", of_three_brokers(), on_three_brokers(Path(folder) / "three")),
        ):
            wanted = {name: act for name, act in faults.items() if only in name}
            if not wanted:
                continue
            async with arena_at as arena:
                for n, (name, act) in enumerate(wanted.items()):
                    try:
                        outcome = await endure(
                            arena, name, act, seed + n, n=REQUESTS, during_s=DURING_S,
                            out=OUT / where.replace(" ", "-"),
                        )  # fmt: skip
                    except (AssertionError, TimeoutError, ExceptionGroup) as error:
                        broken.append(f"{where}: {name}, seed {seed + n}: {error!r}")
                        print(broken[-1], flush=True)
                        break  # the next one would begin with books that do not balance
                    tables.setdefault(where, []).append(outcome)
                    print(row(outcome), flush=True)
    if not only and not broken:
        write(tables, OUT / "table.md")
    return len(broken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int, default=20_261_123)
    arguments = parser.parse_args()
    sys.exit(asyncio.run(main(arguments.only, arguments.seed)))
