"""Metrics of a process's build and, from /proc, of its use, named as in Prometheus' own clients."""

import os
import platform
import resource
from importlib.metadata import version
from pathlib import Path

from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry

PROC = Path("/proc/self")


def about(section: str) -> Registry:
    """The metrics that every process has, whatever its service counts."""
    made = Registry()
    text = "1; the version of Slackline and of Python, and the service."
    labels = ("service", "version", "python")
    gauge = made.gauge(names.BUILD_INFO, text, labels)
    gauge.labels(section, version("slackline"), platform.python_version()).set(1)
    if not PROC.exists():
        return made
    cpu = made.counter(names.PROCESS_CPU, "User and system CPU time.").labels()
    resident = made.gauge(names.PROCESS_RESIDENT, "Resident memory.").labels()
    virtual = made.gauge(names.PROCESS_VIRTUAL, "Virtual memory.").labels()
    open_files = made.gauge(names.PROCESS_OPEN_FILES, "Open file descriptors.").labels()
    most_files = made.gauge(
        names.PROCESS_MOST_FILES, "The limit of open file descriptors."
    ).labels()
    made.gauge(names.PROCESS_START, "Start of the process, Unix time.").labels().set(
        _start_unix_s()
    )

    def refresh() -> None:
        used = os.times()
        cpu.value = used.user + used.system
        pages = [int(word) for word in (PROC / "statm").read_text().split()[:2]]
        virtual.set(pages[0] * resource.getpagesize())
        resident.set(pages[1] * resource.getpagesize())
        open_files.set(len(os.listdir(PROC / "fd")) - 1)  # without the one for this listing
        most_files.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

    made.before_scrape(refresh)
    return made


def _start_unix_s() -> float:
    boot_unix_s = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    # the name of the program, in brackets, may have spaces
    after_name = (PROC / "stat").read_text().rpartition(")")[2].split()
    return boot_unix_s + int(after_name[19]) / os.sysconf("SC_CLK_TCK")
