"""Runs the commands of a page in docs/ as a reader would, for tests of these pages."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.infra.prometheus import ROOT

WITHIN_S = 300.0  # the longest that a busy machine may take for anything


def blocks(page: str, heading: str) -> list[str]:
    """The commands below a heading, as they follow one another."""
    _, _, rest = (ROOT / "docs" / page).read_text().partition(f"{heading}\n")
    return re.findall(r"```sh\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


class PageRun:
    """A reader of a page in the root of the checkout, with this environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    @contextmanager
    def running(self, script: str, log: Path) -> Iterator[None]:
        """A terminal with these commands, until Ctrl-C."""
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-ec", script],
                cwd=ROOT,
                env=self._environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                yield
            finally:
                os.killpg(process.pid, signal.SIGINT)
                process.wait(WITHIN_S)

    def once(self, script: str) -> str:
        """The output of commands that end."""
        done = subprocess.run(
            ["bash", "-ec", script],
            check=False,
            cwd=ROOT,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def until_up(self, url: str, log: Path) -> None:
        """Wait until this address answers."""
        end = time.monotonic() + WITHIN_S
        while time.monotonic() < end:
            try:
                if httpx.get(url, trust_env=False).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise AssertionError(log.read_text())
