"""`python -m loadgen.lab.papers`: the runs behind docs/laboratory.md, and its tables."""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadgen.cli.options.option import add_options
from loadgen.fleet.gpus import cores
from loadgen.lab.papers import adaserve, ascendra, qoserve, slackline, slos_serve, sola
from loadgen.lab.papers.execution import Task, run
from loadgen.lab.papers.run import RunResult
from loadgen.lab.papers.search import next_run
from loadgen.lab.papers.store import Store
from loadgen.lab.papers.table import MISSING, Table, render, replaced
from loadgen.lab.papers.values import Results
from loadgen.trials.parallel import check_jobs
from shared.errors import ConfigError

TABLES: dict[str, Table] = {
    table.name: table
    for paper in (qoserve, slos_serve, sola, adaserve, ascendra, slackline)
    for table in paper.TABLES
}
RUNS, SEEDS = "runs/laboratory.jsonl.xz", "runs/laboratory.json"  # beside the page


def make_parser() -> argparse.ArgumentParser:
    names = dict.fromkeys(TABLES)
    names |= dict.fromkeys(row.name for table in TABLES.values() for row in table.rows)
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.lab.papers",
        description="Runs the experiments of the papers and writes their tables to the page.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        metavar="NAME",
        help=f"these tables, figures or loads, not all: {', '.join(names)}",
    )
    add_options(
        parser,
        f"""
        --hours H (float): hours of arrivals in each run, instead of each row's own; the tables are
            then printed, and not written to the page
        --jobs N = {min(2, cores())}: number of processes
        --render: run nothing; write the tables whose runs are there
        --cache DIR = out/results: folder of the finished runs
        --page FILE = docs/laboratory.md: the page
        """,
    )
    return parser


def pending(args: argparse.Namespace, tables: Sequence[Table], store: Store) -> list[Task]:
    """The jobs that have runs to do, each once. Some are asked for only after others have run."""
    waiting: dict[str, Task] = {}
    for table in tables:
        for job in table.jobs(store.get, args.hours):
            if next_run(job, store.get) is not None:
                task = Task(table.name, job, args.cache, args.page.parent / RUNS)
                waiting.setdefault(repr(job), task)
    return list(waiting.values())


def write_page(page: Path, tables: Sequence[Table], store: Store) -> None:
    """Writes the tables that have all their runs; the others stay as they are."""
    text, used = page.read_text(encoding="utf-8"), list[RunResult]()
    file = page.parent / SEEDS
    seeds: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for table in tables:
        results = Results(store.get)
        rendered, records = render(table, results)
        if MISSING in rendered:
            print(f"{table.name} stays as it is: runs are missing", file=sys.stderr)
            continue
        text, seeds[table.name] = replaced(text, table.name, rendered), records
        used += results.used
    page.write_text(text, encoding="utf-8")
    if used:
        store.keep(used)
        lines = (f"{json.dumps(name)}: {json.dumps(seeds[name])}" for name in sorted(seeds))
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(words: list[str] | None = None) -> int:
    args = make_parser().parse_args(words)
    try:
        if args.hours is not None and not 0 < args.hours < math.inf:
            raise ConfigError("--hours must be above 0")
        if not args.page.exists():
            raise ConfigError(f"--page {args.page}: there is no such page")
        processes = check_jobs(args.jobs)
        store = Store(args.cache, args.page.parent / RUNS)
        asked = [t.of(args.only) if args.only else t for t in TABLES.values()]
        tables = [table for table in asked if table.rows]
        while not args.render and (tasks := pending(args, tables, store)):
            run(tasks, processes)
    except ConfigError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    if args.hours is None:
        write_page(args.page, [TABLES[table.name] for table in tables], store)
    for table in tables if args.only or args.hours is not None else ():
        print(f"{table.name}\n\n{render(table, Results(store.get, args.hours))[0]}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
