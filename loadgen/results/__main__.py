"""`python -m loadgen.results`: makes what the pages of docs/ show that are made of runs, and those
pages.
"""

import argparse
import math
import sys
from pathlib import Path

from loadgen.lab.parallel import check_jobs, cores
from loadgen.results.cache import Cache
from loadgen.results.execution import Work, do, left
from loadgen.results.job import recorded
from loadgen.results.page import written
from loadgen.results.pages import PAGES
from loadgen.results.section import Section
from shared.errors import ConfigError

SECTIONS: dict[str, Section] = {
    section.name: section for page in PAGES for section in page.sections
}
PARTS = {
    part.name: [section.name for section in part.sections] for page in PAGES for part in page.parts
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m loadgen.results",
        description="Tables of the papers, run and written to docs/.",
    )
    names = ", ".join(dict.fromkeys((*PARTS, *SECTIONS)))
    made.add_argument(
        "--only",
        nargs="+",
        choices=(*PARTS, *SECTIONS),
        metavar="NAME",
        help=f"run these alone: {names}",
    )
    made.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="of arrivals in each run (default: what each section states)",
    )
    made.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="with Azure's traces of 2023, in our schema (default: not run)",
    )
    made.add_argument(
        "--jobs", type=int, default=min(2, cores()), metavar="N", help="processes (default: 2)"
    )
    made.add_argument(
        "--render", action="store_true", help="run nothing: write the pages from what has been run"
    )
    made.add_argument(
        "--cache",
        type=Path,
        default=Path("out/results"),
        metavar="FOLDER",
        help="of finished runs (default: out/results)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("docs"),
        metavar="FOLDER",
        help="for the pages (default: docs)",
    )
    return made


def main(words: list[str] | None = None) -> int:
    args = parser().parse_args(words)
    names = (
        list(SECTIONS)
        if not args.only
        else [one for name in args.only for one in PARTS.get(name, [name])]
    )
    hours = {} if args.hours is None else dict.fromkeys(names, args.hours)
    cache = Cache(args.cache)

    def works() -> list[Work]:
        """What can be run by now: some runs are asked for only when others have said at which
        rate.
        """
        return left(
            [
                Work(name, job, args.cache, args.traces)
                for name in names
                for job in SECTIONS[name].jobs(3600 * hours.get(name, SECTIONS[name].hours), cache)
                if args.traces is not None or not recorded(job)
            ]
        )

    try:
        if args.hours is not None and not 0 < args.hours < math.inf:
            raise ConfigError("--hours must be above 0")
        jobs = check_jobs(args.jobs)
        while not args.render and (waiting := works()):
            do(waiting, jobs)
    except ConfigError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    for page in PAGES:
        if any(section.name in names for section in page.sections):
            (args.out / page.file).write_text(written(page, cache, hours), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
