"""Runs that were made, one JSON file each, so that work that was broken off goes on where it
stopped.
"""

import os
from pathlib import Path

import msgspec

from loadgen.results.experiment import Made, Run


class Cache:
    """A folder; several processes may write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, run: Run) -> Made | None:
        """None: not made, or kept by a version that knew other figures."""
        try:
            return msgspec.json.decode(self._path(run).read_bytes(), type=Made)
        except (FileNotFoundError, msgspec.ValidationError):
            return None

    def put(self, made: Made) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(made.run)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        part.replace(path)

    def _path(self, run: Run) -> Path:
        return self.folder / f"{run.digest}.json"
