"""Tests of the start of every service: it raises its limit of open files."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1000))
from shared.process.main import run_until_stopped

async def main():
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

run_until_stopped("gateway", main())
"""


def test_a_service_raises_its_limit_of_open_files_as_far_as_it_may() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=root, capture_output=True, check=True, timeout=60)
    assert done.stdout.strip() == b"1000"
