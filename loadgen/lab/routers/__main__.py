"""Routers side by side on prompts that begin alike. All get the same arrivals, policy and index of
prefixes. `python -m loadgen.lab.routers --trace FILE` prints docs/prefixes.md's table, and this
draws its plots:

    python -m loadgen.lab.routers --trace FILE --part 0.1 --plots docs --rows FILE \\
        --load agent-loops --load rag --load system-prompt --load trace \\
        --router ours --router "least load" --policy slackline --policy qoserve \\
        --replicas 1 --replicas 2 --replicas 4 --replicas 8 --replicas 16
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from loadgen.lab.routers.peers import ROUTERS
from loadgen.lab.routers.plots import draw
from loadgen.lab.routers.runs import LOADS, TRACE, Job, Row, run

HEADS = (
    "load",
    "replicas",
    "router, policy",
    "SLOs met",
    "found",
    "TTFT p50, p99",
    "goodput",
    "busiest",
)


def rows(jobs: Sequence[Job], processes: int, kept: Path | None) -> Iterator[Row]:
    """The rows of these jobs, in their order. A row in the file `kept` is not computed again."""
    known = {row.job: row for row in _read(kept)} if kept is not None and kept.exists() else {}
    with ProcessPoolExecutor(processes) as pool:
        runs = {job: pool.submit(run, job) for job in jobs if job not in known}
        for job in jobs:
            row = known[job] if job in known else runs[job].result()
            if job not in known and kept is not None:
                with kept.open("ab") as file:
                    file.write(msgspec.json.encode(row) + b"\n")
            yield row


def _read(kept: Path) -> list[Row]:
    return [msgspec.json.decode(line, type=Row) for line in kept.read_bytes().splitlines()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=5, help="nothing was chosen with 5")
    parser.add_argument("--replicas", type=int, action="append", help="default: 8")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="default: all")
    parser.add_argument("--router", action="append", choices=list(ROUTERS), help="default: all")
    parser.add_argument("--trace", default="", help="a trace with prefixes, as of Mooncake")
    parser.add_argument("--policy", action="append", help="default: slackline")
    parser.add_argument("--part", type=float, default=1.0, help="of each load's time (1)")
    parser.add_argument("--host-kv-tokens", type=int, default=0, help="in each host's memory (0)")
    parser.add_argument("--late", type=float, default=0.0, help="age of the index, seconds (0)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path, help="a file that keeps the results")
    parser.add_argument("--plots", type=Path, help="draw plots into this folder")
    args = parser.parse_args(argv)
    jobs = [
        Job(
            load=load,
            router=router,
            replicas=replicas,
            seed=args.seed,
            policy=policy,
            trace=args.trace if load == TRACE else "",
            part=args.part,
            late_s=args.late,
            host_kv_tokens=args.host_kv_tokens,
        )
        for load in args.load or LOADS
        if args.trace or load != TRACE
        for replicas in args.replicas or [8]
        for router in args.router or ROUTERS
        for policy in args.policy or ["slackline"]
    ]
    print(f"| {' | '.join(HEADS)} |\n|{len(HEADS) * '---|'}", flush=True)
    found = []
    for row in rows(jobs, args.jobs, args.rows):
        job = row.job
        found.append(row)
        print(
            f"| {job.load} | {job.replicas} | {job.router}, {job.policy} | {100 * row.met:.1f} % | "
            f"{100 * row.found:.1f} % | {row.ttft_p50_s:.2f}, {row.ttft_p99_s:.2f} s | "
            f"{row.goodput_rps:.1f}/s | {row.imbalance:.2f} |",
            flush=True,
        )
    if args.plots is not None:
        for path in draw(found, args.plots):
            print(path)


if __name__ == "__main__":
    main()
