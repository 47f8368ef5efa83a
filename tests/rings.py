"""Runs sets of tests, the rings: `python -m tests.rings fast slow live [-- options of pytest]`.

`fast` is `make test`, with lint and types beside it. `slow` is the tests with the marker `slow`.
`slow_but` marks parameters of a test as slow. `live` compares a live fleet with the simulator, and
needs the machine to itself. The last line sums up all rings in pytest's own words.
"""

import re
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", "--strict"))
LIVE = "tests/fleet/test_live_agrees.py"
# The last three run in environments of their own: `make test-vllm`, `-clients`, `-containers`.
ELSEWHERE = (LIVE, "tests/services/worker/vllm", "tests/clients", "tests/infra/test_containers.py")
TWO_AT_ONCE = ("-n2", "--dist=worksteal", *(f"--ignore={path}" for path in ELSEWHERE))
RINGS = {
    "fast": (*TWO_AT_ONCE, "-m", "not slow"),
    "slow": (*TWO_AT_ONCE, "-m", "slow"),
    "live": ("-rs", LIVE),
}
# Eight minutes on two cores. More is told and is no failure: seconds depend on the machine.
BUDGET_CORE_S = {"fast": 960.0}
COUNTS = re.compile(r"(\d+) (failed|passed|skipped|xfailed|xpassed|errors?|warnings?)")


def slow_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values of one parameter, or tuples of several, all of them slow but `fast`."""
    fast = list(fast)

    def param(value: Any) -> Any:
        of = value if isinstance(value, tuple) else (value,)
        return value if value in fast else pytest.param(*of, marks=pytest.mark.slow)

    return [param(value) for value in values]


def checked(command: tuple[str, ...]) -> bool:
    """Run a check, and print what it says once it has ended."""
    done = subprocess.run(
        (sys.executable, "-m", *command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"\n{' '.join(command)}: {done.stdout}", end="", flush=True)
    return done.returncode == 0


def ran(options: tuple[str, ...]) -> tuple[bool, Counter[str]]:
    """Run pytest and pass on what it prints; whether all is well, and how many tests ended how."""
    with subprocess.Popen(
        (sys.executable, "-m", "pytest", *options), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        tail = b""
        while some := process.stdout.read1():
            tail = (tail + some)[-4096:]
            sys.stdout.buffer.write(some)
            sys.stdout.buffer.flush()
    ends = Counter[str]()
    for count, end in COUNTS.findall(tail.decode(errors="replace").strip().rpartition("\n")[2]):
        ends[end.removesuffix("s") if end.startswith(("error", "warning")) else end] += int(count)
    return process.returncode == 0, ends


def main(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    rings, options = words[:at], words[at + 1 :]
    began_s, ends, well = time.monotonic(), Counter[str](), True
    for ring in rings:
        before_s = core_s()
        with ThreadPoolExecutor() as threads:
            checks = [threads.submit(checked, c) for c in CHECKS if ring == "fast"]
            passed, more = ran((*RINGS[ring], *options))
        failed = sum(not check.result() for check in checks)
        well, ends = well and passed and not failed, ends + more + Counter(error=failed)
        used_s, budget_s = core_s() - before_s, BUDGET_CORE_S.get(ring)
        print(f"\n{ring}: {used_s:.0f} core-seconds" + (f" of {budget_s:.0f}" if budget_s else ""))
        if budget_s and used_s > budget_s:
            print(f"warning: {ring} is over its budget, unless this machine is slow or busy")
    order = ("failed", "passed", "skipped", "xfailed", "xpassed", "warning", "error")
    took_s = round(time.monotonic() - began_s)
    told = ", ".join(f"{ends[end]} {end}" for end in order if ends[end])
    print(f"{told or 'no tests ran'} in {took_s} s ({took_s // 60} min {took_s % 60} s)")
    return 0 if well else 1


def core_s() -> float:
    """User and system time of every process that this one has waited for, and those waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
