"""Tests of an upgrade, one process at a time: services of the release before run beside those of
today, under load, and no request is lost.

The release before is the newest tag before HEAD, or what SLACKLINE_BEFORE names. Where
there is none (a copy without its history), the test is skipped.
"""

import io
import os
import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.child import Child
from loadgen.fleet.fleet import Fleet, FleetSpec
from tests.fleet.live import check, client_of, draw_requests, under_load, until_idle, until_ready

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
ROOT = Path(__file__).parents[2]
SEED = 20_261_130
# workers last, as docs/operate.md has it
ORDER = ("relegation", "admission", "planner", "gateway", "worker-r1", "worker-r2")


def git(*arguments: str) -> bytes:
    return subprocess.run(("git", "-C", ROOT, *arguments), check=True, capture_output=True).stdout


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the release before."""
    try:
        named = os.environ.get("SLACKLINE_BEFORE")
        name = named or git("describe", "--tags", "--abbrev=0", "HEAD~1").decode().strip()
        archive = git("archive", name, "services", "shared")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no tag of an earlier release in this copy")
    folder = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    print(f"before: {name}")
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    spec = FleetSpec(pace=0.5, store=tmp_path_factory.mktemp("fleet"), drain_s=3.0)
    async with Fleet(spec) as fleet:
        yield fleet


async def replace(child: Child, tree: Path | None) -> None:
    """Restart a process in order with the code of a tree; None: with that of today."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        child.environment.pop(name, None)
    if tree is not None:  # the tree goes before the folder in which the process starts
        child.environment |= {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"}
    await child.restart()


@pytest.mark.parametrize("to", ["the release before", "today"])
async def test_no_request_is_lost_while_one_process_after_another_is_replaced(
    fleet: Fleet, before: Path, to: str
) -> None:
    """First back to the release before, then forward again: each mixture is met both ways."""
    tree = before if to == "the release before" else None
    async with client_of(fleet) as (bus, client, wire):

        async def roll() -> None:
            for name in ORDER:
                await replace(fleet.process(name), tree)
                await until_ready(bus, fleet.replicas)

        requests = draw_requests(SEED, 120, prompt=(5, 400), output=(40, 160))
        delivered = await under_load(client, requests, 12.0, roll)
        await check(bus, wire, delivered)
        await until_idle(bus, fleet.replicas)
    for name in ORDER:
        running = fleet.process(name).environment.get("PYTHONPATH", "")
        assert running == ("" if tree is None else str(tree))
