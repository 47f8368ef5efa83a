"""Asks the kernel about processes, for tests of fleets: children, ends, and owners of ports."""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int, of: str = "") -> list[int]:
    """The child processes of all threads of a process; `of`: those with this word on their command
    line.
    """
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
        if not of or of in Path(f"/proc/{child}/cmdline").read_text()
    ]


def gone(pid: int) -> bool:
    """Tells whether the process has ended, its exit status read or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(what: Callable[[], bool], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until_s, f"not within {within_s:g} s"
        time.sleep(0.01)


def owner_of_port(port: int) -> int:
    """The process of this user whose socket has this local TCP port, connected or listening; 0 if
    there is none.
    """
    sockets = {
        f"socket:[{fields[9]}]"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if int((fields := line.split())[1].rpartition(":")[2], 16) == port
    }
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                for handle in (folder / "fd").iterdir():
                    if os.readlink(handle) in sockets:
                        return int(folder.name)
    return 0
