"""Tests of a service's logs: JSON lines that say who wrote them and when, filtered by level."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import structlog

from shared.errors import ConfigError
from shared.process.logs import LINES_A_MINUTE, Sparing, configure

ROOT = Path(__file__).parents[3]
PROGRAM = """
import logging
from shared.process.logs import configure, logger
log = logger()
configure("planner", "p1")
log.debug("plan.built", seq=1)
log.info("request.finished", ttft_s=0.5, slo_met=True, odd={1, 2})
logging.getLogger("nats").warning("slow consumer %d", 7)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("service.failed")
"""


def lines(level: str) -> list[dict[str, Any]]:
    env = {"SLACKLINE_LOG_LEVEL": level, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, check=True, timeout=60
    )
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def test_every_line_is_json_and_says_who_and_when() -> None:
    seen = lines("debug")
    assert [line["event"] for line in seen] == [
        "plan.built",
        "request.finished",
        "library.logged",
        "service.failed",
    ]
    assert all(
        (line["service"], line["instance"]) == ("planner", "p1") and line["at"].endswith("+00:00")
        for line in seen
    )
    assert (seen[1]["ttft_s"], seen[1]["slo_met"], seen[1]["level"]) == (0.5, True, "info")
    assert (seen[2]["logger"], seen[2]["message"], seen[2]["level"]) == (
        "nats",
        "slow consumer 7",
        "warning",
    )
    assert "ZeroDivisionError" in seen[3]["exception"]


def test_the_level_filters() -> None:
    assert [line["event"] for line in lines("WARNING")] == ["library.logged", "service.failed"]


def test_warnings_that_others_can_cause_are_left_out_beyond_some_a_minute() -> None:
    at_s = [0.0]
    spare = Sparing(lambda: at_s[0])

    def kept(event: str, level: str = "warning") -> dict[str, Any] | None:
        try:
            return dict(spare(None, level, {"event": event, "level": level}))
        except structlog.DropEvent:
            return None

    assert sum(kept("payload.refused") is not None for _ in range(1_000)) == LINES_A_MINUTE
    assert kept("bus.disconnected") is not None, "each event has its own"
    assert all(kept("request.finished", "info") is not None for _ in range(1_000))
    at_s[0] = 60.0
    assert kept("payload.refused") == {
        "event": "payload.refused", "level": "warning", "lines_left_out": 1_000 - LINES_A_MINUTE,
    }  # fmt: skip
    again = kept("payload.refused")
    assert again is not None and "lines_left_out" not in again


def test_an_unknown_level_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="SLACKLINE_LOG_LEVEL"):
        configure("planner", "p1", {"SLACKLINE_LOG_LEVEL": "loud"})


def run(program: str, *, stdout: int | IO[bytes] | None = None, closed: bool = False) -> None:
    """Run a program whose stdout is this file, or is closed. Raises where it fails."""
    shut = ["sh", "-c", 'exec "$@" >&-', "sh"] if closed else []
    subprocess.run(
        [*shut, sys.executable, "-c", program],
        env={"PYTHONPATH": str(ROOT), "PATH": os.defpath},
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=True,
        timeout=60,
    )


def test_a_full_disk_ends_no_service() -> None:
    with Path("/dev/full").open("wb") as full:
        run(PROGRAM, stdout=full)


def test_a_closed_stdout_ends_no_service() -> None:
    run(PROGRAM, closed=True)


def test_lines_are_whole_again_after_a_full_disk_and_say_how_many_are_missing(
    tmp_path: Path,
) -> None:
    program = """
import resource
from shared.process.logs import configure, logger
log = logger()
configure("planner", "p1")
log.info("disk.empty")
resource.setrlimit(resource.RLIMIT_FSIZE, (400, resource.RLIM_INFINITY))
for _ in range(3):
    log.info("disk.full", text=300 * "x")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.info("disk.mended")
log.info("disk.empty")
"""
    with (tmp_path / "log").open("wb") as file:
        run(program, stdout=file)
    first, torn, mended, last = (tmp_path / "log").read_bytes().splitlines()
    assert (json.loads(first)["event"], b"disk.full" in torn) == ("disk.empty", False)
    assert json.loads(mended)["event"] == "disk.mended"
    assert json.loads(mended)["lines_dropped"] == 3
    assert "lines_dropped" not in json.loads(last)
