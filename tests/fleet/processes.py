"""What the kernel says of processes."""

import time
from collections.abc import Callable
from pathlib import Path


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    """Also if nobody has asked for its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(what: Callable[[], bool], within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until_s, f"not within {within_s:g} s"
        time.sleep(0.01)
