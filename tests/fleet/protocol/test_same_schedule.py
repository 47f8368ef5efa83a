"""A seed plays the same schedule in every process, whatever the order of its sets of strings."""

import os
import subprocess
import sys
from pathlib import Path

STORY = """
import logging, re
import structlog
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import run
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
scene = Scene(replicas=3, faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, deletions=6)
# the name of a client's inbox is drawn anew each time
print(re.sub("_INBOX.default.[0-9a-f]{32}", "", run(0, scene).net.story()))
"""


def test_a_seed_plays_the_same_schedule_in_every_process() -> None:
    """Records are deleted: admission looks for their attempts in the logs of all replicas."""
    stories = [
        subprocess.run(
            [sys.executable, "-c", STORY],
            cwd=Path(__file__).parents[3],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert len(stories[0].splitlines()) > 1000
    assert stories[0] == stories[1]
