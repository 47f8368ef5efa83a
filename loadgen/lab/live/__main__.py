"""Policies live on one replica, beside the simulator's prediction and beside vLLM alone.

Run python -m loadgen.lab.live. One replica serves the same questions in three tiers of pace, at
rates that rise, under each policy in turn, --turns times; then the simulator serves them. It prints
a table in Markdown, and writes it and all figures to a folder. --engine vllm and --alone want an
environment that has vLLM.
"""

import argparse
import gc
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from loadgen.bench import machine
from loadgen.lab.live.load import Questions, RisingLoad
from loadgen.lab.live.rows import Row, markdown
from loadgen.lab.live.serving import ALONE, BY_PRIORITY, System, serve, serve_alone
from loadgen.trials.comparison import Contestant, parse_policies
from shared.errors import ConfigError
from shared.models import shipped as models
from shared.text.tokenizer import Tokenizer

POLICIES = "vllm,vllm:spec_tokens=1,vllm:spec_tokens=3,slos_serve,adaserve,slackline"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.lab.live",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seed", type=int, default=1, metavar="K", help="seed of the first turn (default: 1)")
    add("--turns", type=int, default=1, metavar="N", help="each with the next seed (default: 1)")
    add("--duration", type=float, default=60.0, metavar="S", help="of arrivals (default: 60)")
    shown = "(default: %(default)s)"
    add("--rates", default="10,20,40", metavar="R,R,...", help=f"requests/s, in turn {shown}")
    add(
        "--paces",
        default="6,12,30",
        metavar="MS,MS,MS",
        help=f"longest mean time per token of the tiers tight, medium and loose, in ms {shown}",
    )
    add("--engine", choices=("torch", "vllm"), default="torch", help="(default: torch)")
    add(
        "--alone",
        action="store_true",
        help="also vLLM alone, in the order of arrival and by priority, as an operator runs it",
    )
    add("--model", default=models.DEFAULT, metavar="NAME|FOLDER", help=f"the model {shown}")
    draft = models.DRAFTS[models.DEFAULT]
    add("--draft-model", default=draft, metavar="NAME|FOLDER|none", help=f"beside it {shown}")
    add(
        "--policies",
        default=POLICIES,
        metavar="NAME[:KEY=VALUE[+KEY=VALUE...]],...",
        help=f"policies in turn {shown}",
    )
    add("--out", type=Path, default=Path("out/live"), metavar="DIR", help=f"results {shown}")
    return parser


def numbers(text: str, option: str, factor: float = 1.0) -> list[float]:
    """Raises ConfigError."""
    try:
        found = [factor * float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ConfigError(f"{option} `{text}`: expected numbers above 0, separated by commas")
    return found


def in_turns(
    loads: Sequence[RisingLoad], systems: Sequence[Contestant | str]
) -> list[tuple[RisingLoad, Contestant | str]]:
    """All systems with each load, in the order in which they are served. Each turn begins with
    another one: a machine may be slower at the end of every one.
    """
    order = list[tuple[RisingLoad, Contestant | str]]()
    for n, load in enumerate(loads):
        first = n * len(systems) // len(loads)
        order += [(load, system) for system in (*systems[first:], *systems[:first])]
    return order


async def _compare(
    args: argparse.Namespace, loads: Sequence[RisingLoad], console: Console
) -> list[Row]:
    """The rows of all turns. After each the folder has those that there are."""
    tokenizer = Tokenizer.load(models.folder(models.DEFAULT))
    system = System(args.engine, args.model, args.draft_model)
    contestants: list[Contestant | str] = [*parse_policies(args.policies)]
    contestants += [ALONE, BY_PRIORITY] if args.alone else []
    args.out.mkdir(parents=True, exist_ok=True)
    rows, acceptance = list[Row](), None
    for load, one in in_turns(loads, contestants):
        prompts = Questions(tokenizer, load.seed)
        if isinstance(one, str):
            row = await serve_alone(one, system, load, prompts, console)
        else:
            row, seen = await serve(one, system, load, prompts, acceptance, console)
            if "spec_tokens" in one.settings and acceptance is None:
                acceptance = seen  # all decodes draft there
        rows.append(row)
        console.print(f"{row.name}: {100 * row.live.met:.1f} % live")
        (args.out / "rows.json").write_bytes(msgspec.json.encode(rows))
        (args.out / "table.md").write_text(markdown(rows, loads[0]) + "\n")
    return rows


def main() -> int:
    parser = _parser()
    args = parser.parse_args()
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
    try:
        rates, paces = numbers(args.rates, "--rates"), numbers(args.paces, "--paces", 1e-3)
        if len(paces) != 3:
            raise ConfigError(f"--paces `{args.paces}`: there are three tiers")
        if args.turns < 1:
            raise ConfigError(f"--turns {args.turns}: expected 1 or more")
        for model in {args.model, args.draft_model} - {"none"}:
            models.folder(model)  # fails here, and not in a worker
        seeds = range(args.seed, args.seed + args.turns)
        loads = [RisingLoad(rates, args.duration, paces, seed) for seed in seeds]
        rows = uvloop.run(_compare(args, loads, console))
    except ConfigError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        console.print(f"stopped; {args.out} has the rows that had ended")
        return 130
    gc.collect()  # now, while the modules that AsyncLLM's finaliser needs are still loaded
    command = shlex.join(["python", "-m", "loadgen.lab.live", *sys.argv[1:]])
    today = datetime.now(UTC).date().isoformat()
    print(f"{today}, `{command}`, {machine.describe()}.\n\n{markdown(rows, loads[0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
