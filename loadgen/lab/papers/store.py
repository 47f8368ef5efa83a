"""Stores the results of runs: those behind docs/laboratory.md in one file of the project, and those
of this machine in a JSON file each.

With the project's file a change of one policy repeats only the runs of that policy.
"""

import lzma
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from loadgen.lab.papers.run import Run, RunResult
from shared.errors import ConfigError


class KeptRun(Struct, frozen=True):
    """A result, and the version of its policy (`Run.version`)."""

    version: int
    result: RunResult


class Store:
    """Several processes may write to the folder; the file is read once."""

    def __init__(self, folder: Path, file: Path | None = None) -> None:
        """Raises ConfigError for a damaged file."""
        self._folder, self.file = folder, file
        self.kept = {} if file is None or not file.exists() else _read(file)

    def get(self, run: Run) -> RunResult | None:
        """The result of a run; None if the run was not made with the policy as it is."""
        one = self.kept.get(run.key)
        if one is not None and one.version == run.version:
            return one.result
        try:
            return msgspec.json.decode(self._path(run).read_bytes(), type=RunResult)
        except (FileNotFoundError, msgspec.ValidationError):
            return None

    def put(self, result: RunResult) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(result.run)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.encode(result))
        part.replace(path)

    def keep(self, used: Iterable[RunResult]) -> None:
        """Writes these results to the file, beside those of a table that is not outdated yet."""
        new = {one.run.key: KeptRun(one.run.version, one) for one in used}
        if self.file is None or self.kept | new == self.kept:
            return
        self.kept |= new
        write(self.file, self.kept.values())

    def _path(self, run: Run) -> Path:
        return self._folder / f"{run.key}-{run.version}.json"


def _read(file: Path) -> dict[str, KeptRun]:
    try:
        lines = lzma.decompress(file.read_bytes()).splitlines()
        kept = [msgspec.json.decode(line, type=KeptRun) for line in lines]
    except (EOFError, lzma.LZMAError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): take it from git again") from error
    return {one.result.run.key: one for one in kept}


def write(file: Path, kept: Iterable[KeptRun]) -> None:
    """Writes the file at once, similar runs together, which makes it a third smaller."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(kept, key=lambda one: msgspec.json.encode(one.result.run))
    part = file.with_suffix(".part")
    part.write_bytes(lzma.compress(b"\n".join(map(msgspec.json.encode, ordered))))
    part.replace(file)
