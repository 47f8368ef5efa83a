"""`python -m loadgen.lab.papers`: the runs behind the pages of docs/, and those pages."""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from loadgen.lab.papers import kept
from loadgen.lab.papers.cache import Cache
from loadgen.lab.papers.execution import Task, pending, run_tasks
from loadgen.lab.papers.job import needs_trace
from loadgen.lab.papers.page import render_page
from loadgen.lab.papers.pages import PAGES
from loadgen.lab.papers.section import Section
from loadgen.markdown import table
from loadgen.trials.parallel import check_jobs, cores
from shared.errors import ConfigError

SECTIONS: dict[str, Section] = {
    section.name: section for page in PAGES for section in page.sections
}
CHAPTERS = {
    chapter.name: [section.name for section in chapter.sections]
    for page in PAGES
    for chapter in page.chapters
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadgen.lab.papers",
        description="Runs the experiments of the papers and writes their tables to docs/.",
    )
    names = ", ".join(dict.fromkeys((*CHAPTERS, *SECTIONS)))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*CHAPTERS, *SECTIONS),
        metavar="NAME",
        help="run these papers or sections alone; the others stay as they are in the pages: "
        f"{names}",
    )
    parser.add_argument(
        "--hours",
        type=float,
        metavar="H",
        help="hours of arrivals in each run (default: as each section sets it)",
    )
    parser.add_argument(
        "--traces",
        type=Path,
        metavar="FOLDER",
        help="folder with Azure's traces of 2023 in our schema "
        "(default: none; the runs that need them are left out)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(2, cores()),
        metavar="N",
        help="number of processes (default: 2, or 1 on a single core)",
    )
    parser.add_argument(
        "--render",
        action="store_true",
        help="run nothing; write the pages from the finished runs",
    )
    parser.add_argument(
        "--list",
        action="store_true",
        help="run nothing and write no page; list the sections with what there is to run, as after "
        "a change of a policy",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path("out/results"),
        metavar="FOLDER",
        help="folder of the finished runs (default: out/results)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs"),
        metavar="FOLDER",
        help="folder to write the pages to (default: docs)",
    )
    return parser


def main(words: list[str] | None = None) -> int:
    args = make_parser().parse_args(words)
    names = (
        list(SECTIONS)
        if not args.only
        else [section for name in args.only for section in CHAPTERS.get(name, [name])]
    )
    hours = {} if args.hours is None else dict.fromkeys(names, args.hours)
    cache = Cache(args.cache)
    pages = [page for page in PAGES if any(section.name in names for section in page.sections)]

    def tasks_of(name: str) -> list[Task]:
        """The tasks of a section that can be run by now and have not been.

        Some runs are requested only after others have found the rate.
        """
        section = SECTIONS[name]
        jobs = section.jobs(3600 * hours.get(name, section.hours), cache.get)
        return pending(
            [
                Task(name, job, args.cache, args.traces)
                for job in jobs
                if args.traces is not None or not needs_trace(job)
            ]
        )

    try:
        if args.hours is not None and not 0 < args.hours < math.inf:
            raise ConfigError("--hours must be above 0")
        processes = check_jobs(args.jobs)
        for page in pages:
            kept.unpack(kept.file_of(page, args.out), cache)
        if args.list:
            print(listed({name: tasks_of(name) for name in names}))
            return 0
        _make(args.out)
        for name in names if args.render else ():
            if waiting := tasks_of(name):
                print(f"{name}: {len(waiting)} to run; its figures stay", file=sys.stderr)
        while not args.render and (tasks := [task for name in names for task in tasks_of(name)]):
            run_tasks(tasks, processes)
    except ConfigError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    for page in pages:
        file = args.out / page.file
        present = file.read_text(encoding="utf-8") if file.exists() else ""
        text = render_page(page, cache, hours, names, present)
        file.write_text(text, encoding="utf-8")
        for moved in kept.pack(page, hours, cache, kept.file_of(page, args.out)):
            print(moved, file=sys.stderr)
    return 0


def _make(folder: Path) -> None:
    """Makes the folder of the pages before anything runs. Raises ConfigError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: it cannot be made: {error.strerror}") from error


def listed(tasks: Mapping[str, Sequence[Task]]) -> str:
    """A table of the sections that have something to run, with the policies that run."""
    rows = [
        (name, str(len(waiting)), ", ".join(dict.fromkeys(task.policy for task in waiting)))
        for name, waiting in tasks.items()
        if waiting
    ]
    return table(("section", "runs or searches", "policies"), rows) if rows else "Nothing to run."


if __name__ == "__main__":
    sys.exit(main())
