"""Logs: JSON lines with who said it, filtered by level."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.errors import ConfigError
from shared.process.logs import configure

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


def test_an_unknown_level_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="SLACKLINE_LOG_LEVEL"):
        configure("planner", "p1", {"SLACKLINE_LOG_LEVEL": "loud"})
