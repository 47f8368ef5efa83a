"""Dynamo's simulator beside this one: `python -m loadgen.lab.judge --trace FILE` replays the file
in both, each under round robin and under its own router by cached prefix. With `--apart` under
round robin, with prompts and outputs on different replicas.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace
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
TOGETHER = Load(replicas=8, kv_tokens=400_000)
APART = (
    TOGETHER,
    *(replace(TOGETHER, prefill=4, link_gbit_s=link) for link in (25.0, 100.0, 400.0)),
    *(replace(TOGETHER, prefill=count, link_gbit_s=100.0) for count in (2, 3, 5)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the trace (600)")
    parser.add_argument("--jitter", type=float, default=3.0, help="seconds (3, as Mooncake needs)")
    parser.add_argument("--apart", action="store_true", help="prompts and outputs apart")
    args = parser.parse_args()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    means = ("found", "TTFT mean", "p50", "p99", "TPOT mean", "TTLT mean")
    for name in ("replicas", "link", "KV", "speed", "simulator", *means):
        table.add_column(name, justify="right")

    def row(load: Load, name: str, found: Found) -> None:
        apart = f"{load.prefill} + {load.replicas - load.prefill}"
        table.add_row(
            apart if load.prefill else str(load.replicas),
            f"{load.link_gbit_s:g} Gbit/s" if load.prefill else "",
            f"{load.kv_tokens:,}",
            f"{load.times:g}",
            name,
            percent(found.cached_fraction),
            *(seconds(s) for s in (found.ttft_mean_s, found.ttft_p50_s, found.ttft_p99_s)),
            seconds(found.tpot_mean_s),
            seconds(found.ttlt_mean_s),
        )

    try:
        whole = read_trace(args.trace).within(CONTEXT_TOKENS)
        trace, _ = recorded_arrivals(whole, None, args.seconds, 1, args.jitter)
        with tempfile.TemporaryDirectory() as folder:
            for load in APART if args.apart else ():
                row(load, "Dynamo", theirs(trace, load, Path(folder)))
                row(load, "this one", ours(trace, load))
            for load in () if args.apart else LOADS:
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
