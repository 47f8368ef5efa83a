"""`python -m loadgen.results`: makes what docs/results.md shows, and that page."""

import argparse
import math
import sys
from pathlib import Path

from loadgen.parallel import check_jobs, cores
from loadgen.results import figure7, figure8, figure10, figure12, figure15b, latency, table4, table5, table6
from loadgen.results.cache import Cache
from loadgen.results.job import recorded
from loadgen.results.page import page
from loadgen.results.work import Work, do
from shared.errors import ConfigError

SECTIONS = {
    section.name: section
    for section in (
        figure7.SECTION,
        table4.SECTION,
        table5.SECTION,
        table6.SECTION,
        figure8.SECTION,
        figure10.SECTION,
        figure12.SECTION,
        figure15b.SECTION,
        latency.SECTION,
    )
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m loadgen.results", description="QoServe's tables, run and written to docs/results.md.")
    made.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", help=f"run these alone: {', '.join(SECTIONS)}")
    made.add_argument("--hours", type=float, metavar="H", help="of arrivals in each run (default: what each section states)")
    made.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="with Azure's traces of 2023, in our schema (default: not run)",
    )
    made.add_argument("--jobs", type=int, default=min(2, cores()), metavar="N", help="processes (default: 2)")
    made.add_argument("--render", action="store_true", help="run nothing: write the page from what has been run")
    made.add_argument("--cache", type=Path, default=Path("out/results"), metavar="FOLDER", help="of finished runs (default: out/results)")
    made.add_argument("--out", type=Path, default=Path("docs/results.md"), metavar="FILE", help="default: docs/results.md")
    return made


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    try:
        if args.hours is not None and not 0 < args.hours < math.inf:
            raise ConfigError("--hours must be above 0")
        chosen = [section for name, section in SECTIONS.items() if not args.only or name in args.only]
        works = [
            Work(section.name, job, args.cache, args.traces)
            for section in chosen
            for job in section.jobs(3600 * (section.hours if args.hours is None else args.hours))
            if args.traces is not None or not recorded(job)
        ]
        if not args.render:
            do(works, check_jobs(args.jobs))
    except ConfigError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    hours = {} if args.hours is None else {section.name: args.hours for section in chosen}
    args.out.write_text(page(list(SECTIONS.values()), Cache(args.cache), hours), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
