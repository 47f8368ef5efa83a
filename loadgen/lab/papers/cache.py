"""The cache of results: one JSON file for each run, so that interrupted work can continue."""

import os
from pathlib import Path

import msgspec

from loadgen.lab.papers.experiment import Run, RunResult


class Cache:
    """A folder of results. Several processes may write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, run: Run) -> RunResult | None:
        """The result of a run; None: not run, or written by a version with other figures."""
        try:
            return msgspec.json.decode(self._path(run).read_bytes(), type=RunResult)
        except (FileNotFoundError, msgspec.ValidationError):
            return None

    def put(self, result: RunResult) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(result.run)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
        part.replace(path)

    def _path(self, run: Run) -> Path:
        return self.folder / f"{run.digest}.json"
