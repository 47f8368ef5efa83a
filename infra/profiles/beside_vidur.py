"""Compares our simulator with Vidur's own runs and prints a Markdown table.

    python infra/profiles/beside_vidur.py SOURCE

SOURCE holds fits/, traces/ and vidur_profiles/vidur_sim_runs.csv, which docs/simulator.md
describes. Each of Vidur's runs with Sarathi's scheduler is repeated with fcfs and the same chunk,
as Vidur did it: 1,000 requests, Poisson arrivals, lengths drawn from Azure's traces of 2023, one
A100, no control latency, and no overhead added to the kernels.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import convert
import numpy as np

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import plan_requests
from loadgen.load.trace import Trace, read_trace
from loadgen.load.workload import Rows
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import QOSERVE_3

FITS = {"lean": "a100_llama3-8b-tp1.json", "slow KV": "a100_llama3-8b-tp1_vidur_faithful.json"}
SEEDS = (1, 2, 3)
REQUESTS = 1000
WARM_UP = 20  # the first 1/WARM_UP of the requests is left out, as in Vidur's rows


def profile(source: Path, folder: Path, name: str) -> str:
    convert.OVERHEAD_S = 0.0
    path = folder / f"{name.replace(' ', '-')}.json"
    path.write_text(
        json.dumps(
            convert.table("a100-llama3-8b", json.loads((source / "fits" / FITS[name]).read_text()))
        )
    )
    return str(path)


def run(
    trace: Trace, profile_path: str, chunk_tokens: int, rate_rps: float, seed: int
) -> tuple[float, ...]:
    """TTFT p50 and p99, mean time per output token p50 and p99; seconds."""
    arrivals = draw_arrivals(Gaps(), rate_rps, 1.2 * REQUESTS / rate_rps, seed, ((1.0, 1.0),))[
        :REQUESTS
    ]
    requests = plan_requests(arrivals, Rows(trace, in_order=False), QOSERVE_3, seed)
    settings = {"chunk_tokens": str(chunk_tokens)}
    result = simulate(
        Traffic(requests, QOSERVE_3, seed),
        Deployment("fcfs", profile_path, settings=settings),
        RunOptions(keep_times=True),
    )
    assert result.token_unix_s is not None
    counted = list(zip(requests, result.token_unix_s, strict=True))[len(requests) // WARM_UP :]
    ttft_s = [times[0] - request.arrival_s for request, times in counted]
    tpot_s = [(times[-1] - times[0]) / (len(times) - 1) for _, times in counted if len(times) > 1]
    return (*np.quantile(ttft_s, (0.5, 0.99)).tolist(), *np.quantile(tpot_s, (0.5, 0.99)).tolist())


def main(source: Path) -> None:
    with (source / "vidur_profiles" / "vidur_sim_runs.csv").open() as rows:
        theirs = {row["name"]: row for row in csv.DictReader(rows)}
    print(
        "| trace, chunk, requests/s | | TTFT p50, s | p99 | TPOT p50, ms | p99 |\n"
        "|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        profiles = {name: profile(source, Path(folder), name) for name in FITS}
        for kind in ("conv", "code"):
            trace = read_trace(source / "traces" / f"azure2023_{kind}_first_half.csv.gz").within(
                8192
            )
            for chunk_tokens in (256, 512):
                for rate in (2, 4, 6):
                    row = theirs[f"{kind}_s{chunk_tokens}_q{rate}"]
                    values = [
                        float(row[key]) for key in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
                    ]
                    show(f"{kind}, {chunk_tokens}, {rate}", "Vidur", values)
                    for name, path in profiles.items():
                        runs = [run(trace, path, chunk_tokens, float(rate), seed) for seed in SEEDS]
                        show(
                            "",
                            f"ours, {name}",
                            [median(column) for column in zip(*runs, strict=True)],
                        )


def show(load: str, simulator: str, values: list[float]) -> None:
    ttft_p50, ttft_p99, tpot_p50, tpot_p99 = values
    print(
        f"| {load} | {simulator} | {ttft_p50:.3f} | {ttft_p99:.2f} "
        f"| {1000 * tpot_p50:.1f} | {1000 * tpot_p99:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
