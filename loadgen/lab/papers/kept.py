"""The runs behind a page, in one file beside it that belongs to the project.

With it a change of one policy repeats the runs of that policy alone, and what they moved is known.
The file is `runs/PAGE.jsonl.xz` in the folder of the pages: a `KeptRun` a line.
"""

import lzma
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from loadgen.lab.papers.cache import Cache
from loadgen.lab.papers.experiment import Run, RunResult, violated_fraction
from loadgen.lab.papers.section import Page, Results
from shared.errors import ConfigError


class KeptRun(Struct, frozen=True):
    """A result, and the version of its policy (`Run.version`)."""

    version: int
    result: RunResult


def file_of(page: Page, folder: Path) -> Path:
    """The file of a page in this folder of pages."""
    return folder / "runs" / f"{Path(page.file).stem}.jsonl.xz"


def read(file: Path) -> Mapping[str, KeptRun]:
    """The runs of a file by their `Run.key`; none if there is no such file. Runs of a version with
    other figures are left out. Raises ConfigError for a damaged file.
    """
    if not file.exists():
        return {}
    found: dict[str, KeptRun] = {}
    try:
        for line in lzma.decompress(file.read_bytes()).splitlines():
            with suppress(msgspec.ValidationError):
                one = msgspec.json.decode(line, type=KeptRun)
                found[one.result.run.key] = one
    except (EOFError, lzma.LZMAError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): take it from git again") from error
    return found


def write(file: Path, kept: Iterable[KeptRun]) -> None:
    """Writes the file at once, similar runs together, which makes it a third smaller."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        msgspec.json.encode(one)
        for one in sorted(kept, key=lambda one: msgspec.json.encode(one.result.run))
    ]
    part = file.with_suffix(".part")
    part.write_bytes(lzma.compress(b"\n".join(lines)))
    part.replace(file)


def unpack(file: Path, cache: Cache) -> None:
    """Puts the runs of the file into the cache where it lacks them, of policies as they are."""
    for one in read(file).values():
        run = one.result.run
        if one.version == run.version and cache.get(run) is None:
            cache.put(one.result)


def pack(page: Page, hours: Mapping[str, float], cache: Cache, file: Path) -> list[str]:
    """Writes the file anew, from the cache, and where it has no result from the file as it was.

    Returns a line for each run whose figures moved: done again with a policy that has changed.
    `hours` has the length of the runs of each section that does not use its own.
    """
    before = read(file)
    kept: dict[str, KeptRun] = {}

    def lookup(run: Run) -> RunResult | None:
        result = cache.get(run)
        one = before.get(run.key) if result is None else KeptRun(run.version, result)
        if one is None:
            return None
        kept[run.key] = one
        return one.result

    for section in page.sections:
        section.render(Results(lookup), 3600 * hours.get(section.name, section.hours))
    if kept:
        write(file, kept.values())
    return [
        f"{_name(one.result.run)}: {_met(before[key])} before, {_met(one)} now"
        for key, one in kept.items()
        if key in before and _met(before[key]) != _met(one)
    ]


def _name(run: Run) -> str:
    policy = " ".join((run.policy, *(f"{key}={value}" for key, value in run.settings.items())))
    return (
        f"{policy}: {run.workload} at {run.rate_rps:g} requests/s, {run.tiers.name}, "
        f"seed {run.seed}"
    )


def _met(kept: KeptRun) -> str:
    figures = kept.result.figures
    if figures is None:
        return "stopped early"
    return f"{100 * (1 - violated_fraction(figures)):.1f} % met"
