"""Policies that draft, live on the shipped pair of models, beside the simulator's prediction.

Run python -m loadgen.lab.live_drafts. One replica of the torch engine serves the same questions in
three tiers of pace, at rates that rise, under each policy in turn, --turns times. It prints tables
in Markdown and writes them, a plot and all figures to a folder, which after each row has those that
there are. With --engine vllm, in an environment that has vLLM, it adds rows to those of the folder.
"""

import argparse
import os
import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from msgspec.structs import replace
from rich.console import Console

from loadgen.bench import machine
from loadgen.lab.live_drafts.comparison_page import POINTS, Comparison, farthest, markdown, plot
from loadgen.lab.live_drafts.rising_load import Questions, RisingLoad
from loadgen.lab.live_drafts.trial_run import Row, System, serve
from loadgen.lab.live_drafts.turns import in_turns
from loadgen.trials.comparison import parse_policies
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.text.tokenizer import Tokenizer

POLICIES = (
    "vllm,vllm:spec_tokens=1,vllm:spec_tokens=3,vllm:spec_tokens=5,slos_serve,adaserve,slackline"
)
POLICIES_OF_VLLM = "vllm,slos_serve,adaserve,slackline"
RESULT = "result.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadgen.lab.live_drafts", description=__doc__)
    parser.add_argument(
        "--seed", type=int, default=1, metavar="K", help="random seed of the load (default: 1)"
    )
    parser.add_argument(
        "--rates",
        default="10,20,40",
        metavar="R,R,...",
        help="requests/s, one rate after the other (default: 10,20,40)",
    )
    parser.add_argument(
        "--paces",
        default="6,12,30",
        metavar="MS,MS,MS",
        help="longest mean time per token of the tiers tight, medium and loose, in ms (default: "
        "6,12,30)",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds of arrivals (default: 60)",
    )
    parser.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="turns: in each, all policies serve one load, whose seed is one more than that of the "
        "turn before (default: 1)",
    )
    parser.add_argument(
        "--engine", choices=("torch", "vllm"), default="torch", help="(default: torch)"
    )
    parser.add_argument(
        "--model",
        default=models.DEFAULT,
        metavar="NAME|FOLDER",
        help="the model, a shipped one or a folder with its tokenizer (default: %(default)s)",
    )
    parser.add_argument(
        "--draft-model",
        default=models.DRAFTS[models.DEFAULT],
        metavar="NAME|FOLDER",
        help="the draft model beside it (default: %(default)s)",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME[:KEY=VALUE[+KEY=VALUE...]],...",
        help=f"policies in turn (default: {POLICIES}; with --engine vllm: {POLICIES_OF_VLLM})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out/live-drafts"),
        metavar="DIR",
        help="folder for the results (default: out/live-drafts)",
    )
    return parser


def _numbers(text: str, option: str, factor: float = 1.0) -> list[float]:
    """Raises ConfigError."""
    try:
        found = [factor * float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ConfigError(f"{option} `{text}`: expected numbers above 0, separated by commas")
    return found


async def _rows(
    args: argparse.Namespace, loads: Sequence[RisingLoad], console: Console
) -> AsyncIterator[Row]:
    tokenizer = Tokenizer.load(models.folder(models.DEFAULT))
    default = POLICIES_OF_VLLM if args.engine == "vllm" else POLICIES
    contestants = parse_policies(args.policies or default)
    system = System(args.engine, args.model, args.draft_model)
    acceptance = None
    for load, contestant in in_turns(loads, contestants):
        prompts = Questions(tokenizer, load.seed)
        row, seen = await serve(contestant, system, load, prompts, acceptance, console)
        if "spec_tokens" in row.settings and acceptance is None:
            acceptance = seen  # all decodes draft there
        console.print(
            f"{row.name}: {100 * row.live.met:.1f} % live, {100 * row.simulated.met:.1f} simulated"
        )
        yield row


async def _compare(
    args: argparse.Namespace, empty: Comparison, loads: Sequence[RisingLoad], console: Console
) -> Comparison:
    """The rows of all turns. After each the folder has those that there are."""
    found, path = empty, args.out / RESULT
    if args.engine == "vllm" and path.is_file():
        earlier = msgspec.json.decode(path.read_bytes(), type=Comparison)
        found = replace(earlier, rows=[row for row in earlier.rows if row.engine != "vllm"])
    args.out.mkdir(parents=True, exist_ok=True)
    async for row in _rows(args, loads, console):
        after = os.getloadavg()[0]
        found = replace(found, rows=[*found.rows, row])
        if args.engine != "vllm":
            found = replace(found, load_average=(empty.load_average[0], after))
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        (args.out / "tables.md").write_text(markdown(found) + "\n")
        plot(found, args.out / "live-drafts.svg")
    return found


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        rates, paces = _numbers(args.rates, "--rates"), _numbers(args.paces, "--paces", 1e-3)
        if len(paces) != 3:
            raise ConfigError(f"--paces `{args.paces}`: there are three tiers")
        if args.turns < 1:
            raise ConfigError(f"--turns {args.turns}: expected 1 or more")
        for model in (args.model, args.draft_model):
            models.folder(model)  # fails here, and not in a worker
        empty = Comparison(
            command=shlex.join(["python", "-m", "loadgen.lab.live_drafts", *sys.argv[1:]]),
            began=datetime.now(UTC).isoformat(timespec="minutes"),
            seed=args.seed,
            rates_per_s=rates,
            paces_s=paces,
            duration_s=args.duration,
            machine=machine.describe(),
            load_average=(os.getloadavg()[0],) * 2,
            rows=[],
        )
        seeds = range(args.seed, args.seed + args.turns)
        loads = [RisingLoad(rates, args.duration, paces, seed) for seed in seeds]
        found = uvloop.run(_compare(args, empty, loads, console))
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print(f"stopped; {args.out} has the rows that had ended")
        return 130
    print(markdown(found))
    console.print(
        f"live and simulated differ by at most {farthest(found):.1f} points (aim: {POINTS:g}); "
        f"the plot is in {args.out}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
