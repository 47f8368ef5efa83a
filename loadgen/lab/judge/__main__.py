"""Dynamo's simulator beside this one: `python -m loadgen.lab.judge --trace FILE` replays the file
in both, each under round robin and under its own router by cached prefix.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from loadgen.lab.judge.judge import CONTEXT_TOKENS, Found, Load, ours, theirs
from loadgen.load.arrivals import recorded_arrivals
from loadgen.load.report import percent, seconds
from loadgen.load.trace import read_trace
from loadgen.tables import output, print_table
from shared.errors import ConfigError

LOADS = (
    Load(replicas=8, kv_tokens=400_000),
    Load(replicas=8, kv_tokens=2_000_000),
    Load(replicas=4, kv_tokens=400_000),
    Load(replicas=8, kv_tokens=400_000, times=2.0),
    Load(replicas=8, kv_tokens=160_000, times=3.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace (600)")
    parser.add_argument("--jitter", type=float, default=3.0, help="seconds (3, as Mooncake needs)")
    args = parser.parse_args()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("replicas", "KV", "speed", "simulator", "found", "TTFT mean", "p50", "p99"):
        table.add_column(name, justify="right")

    def row(load: Load, name: str, found: Found) -> None:
        table.add_row(
            str(load.replicas),
            f"{load.kv_tokens:,}",
            f"{load.times:g}",
            name,
            percent(found.cached_fraction),
            *(seconds(s) for s in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s)),
        )

    try:
        whole = read_trace(args.trace).within(CONTEXT_TOKENS)
        trace, _ = recorded_arrivals(whole, None, args.seconds, 1, args.jitter)
        with tempfile.TemporaryDirectory() as folder:
            for load in LOADS:
                row(load, "Dynamo", theirs(trace, load, Path(folder)))
                row(load, "this one", ours(trace, load))
                for lag_s in (0.0, 2.0):
                    late = f"{lag_s:g} s late"
                    judged = theirs(trace, load, Path(folder), "kv_router", lag_s)
                    row(load, f"Dynamo, kv_router, {late}", judged)
                    row(load, f"this one, in_time, {late}", ours(trace, load, "in_time", lag_s))
                table.add_section()
    except ConfigError as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    print_table(output(120), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
