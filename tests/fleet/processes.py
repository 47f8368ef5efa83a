"""Questions to the kernel about processes."""

import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The child processes of all threads of a process."""
    return [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
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
