"""vLLM alone beside vLLM behind Slackline, with the same model and requests on one machine.

Run python -m loadgen.lab.beside_vllm in an environment that has vLLM. The first part offers all
requests at once, under the same policy on both sides, and shows the cost of planning vLLM from
outside. The second part offers three tiers in bursts, and shows the gain.
"""

import argparse
import gc
import shlex
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from loadgen.lab.beside_vllm import sized_llama as model
from loadgen.lab.beside_vllm.both_sides import ALONE, Bench
from loadgen.lab.beside_vllm.saturated import Saturated, saturate, saturated_table
from loadgen.lab.beside_vllm.tiers_in_bursts import compare
from loadgen.load.report import Report, side_by_side, write_report


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of result.json."""

    command: str
    seed: int
    saturated: list[Saturated]
    reports: list[Report]


async def _run(args: argparse.Namespace, folder: Path) -> Result:
    console = Console(width=None if sys.stdout.isatty() else 160)
    bench = Bench(
        model.make(folder),
        args.seed,
        args.duration,
        args.requests,
        args.repeats,
        args.together,
        console,
    )
    command = shlex.join(["python", "-m", "loadgen.lab.beside_vllm", *sys.argv[1:]])
    saturated: list[Saturated] = []
    rate = args.rate
    if args.only != "tiers":
        plan = bench.at_once()
        for _ in range(args.starts):
            saturated += await saturate(bench, plan)
        console.print(saturated_table(saturated))
        if rate is None:
            alone = [run for run in saturated if run.label == ALONE]
            rate = args.load * len(plan) * len(alone) / sum(run.took_s for run in alone)
    reports: list[Report] = []
    if args.only != "saturated":
        reports = await compare(bench, rate or 1.0, command)
        console.print(side_by_side(reports))
        for report in reports:
            console.print(f"{report.label}: {'; '.join(report.notes)}", highlight=False)
    return Result(command=command, seed=args.seed, saturated=saturated, reports=reports)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadgen.lab.beside_vllm", description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        metavar="K",
        help="random seed of requests and prompts (default: 1)",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of the bursts (default: 60)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=96,
        metavar="N",
        help="number of requests of a saturated run (default: 96)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="number of saturated runs of each side (default: 3)",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help="number of times that both sides are started; a process may stay slower or faster "
        "than another for its whole life (default: 1)",
    )
    parser.add_argument(
        "--together",
        type=int,
        default=96,
        metavar="N",
        help="number of requests of a saturated run in flight (default: 96)",
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.85,
        metavar="X",
        help="mean rate of the bursts, as a fraction of the rate at which vLLM alone served the "
        "saturated runs (default: 0.85)",
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="mean requests/s of the bursts, instead of --load"
    )
    parser.add_argument("--only", choices=("saturated", "tiers"), help="run this part alone")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/beside-vllm"),
        metavar="DIR",
        help="folder for the results (default: out/beside-vllm)",
    )
    return parser


def main() -> None:
    parser = _parser()
    args = parser.parse_args()
    if args.only == "tiers" and args.rate is None:
        parser.error("--only tiers needs --rate")
    with tempfile.TemporaryDirectory(prefix="slackline-") as folder:
        result = uvloop.run(_run(args, Path(folder)))
    gc.collect()  # now, while the modules that AsyncLLM's finaliser needs are still loaded
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(result), indent=2)
    )
    for report in result.reports:
        name = report.label.lower().replace(", ", "-").replace(" ", "-")
        write_report(report, args.out / f"{name}.json")


if __name__ == "__main__":
    main()
