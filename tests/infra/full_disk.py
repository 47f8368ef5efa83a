"""A small disk for tests, to fill and clear. It needs the right to mount, as root has."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOMY = "2g"  # memory is taken only by what is written


class Disk:
    """A tmpfs whose size changes while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fill = path / "fill"

    def fill(self) -> None:
        """Leave no byte."""
        used = subprocess.run(
            ["df", "-Pk", str(self.path)], check=True, capture_output=True, text=True
        ).stdout.split()[-4]
        _mount("-o", f"remount,size={int(used) + 64}k", str(self.path))
        with self._fill.open("wb", buffering=0) as file:
            for size in (4096, 1):
                try:
                    while file.write(size * b"x"):
                        pass
                except OSError:
                    continue

    def clear(self) -> None:
        """Give the room back."""
        _mount("-o", f"remount,size={ROOMY}", str(self.path))
        self._fill.unlink()


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    """Mount a disk at `path` while the context is open; skip the test where that is forbidden."""
    path.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={ROOMY}", "tmpfs", str(path))
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("a small disk cannot be mounted here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True)
