"""Tests of `slackline up`: how a fleet of real processes starts, ends, and says what went wrong."""

import asyncio
import json
import os
import signal
import sys
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from loadgen.fleet import child as child_module
from loadgen.fleet.child import Child, ChildError
from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.errors import ConfigError
from shared.schemas import Digest
from tests.fleet.live import WAIT_S, ask, check, client_of, draw_requests
from tests.fleet.processes import children_of, gone, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
SEED = 20_261_120
LOADGEN = (sys.executable, "-m", "loadgen")
UP = (*LOADGEN, "up", "--port", "0", "--http-port", "0", "--engine", "sim", "--pace", "0.2")


def log_files(lines: list[str]) -> list[Path]:
    """The files in the folder that `slackline up` named."""
    folders = [Path(line.split()[-1]) for line in lines if line.split()[0] == "logs"]
    return sorted(file for folder in folders if folder.exists() for file in folder.iterdir())


async def started(*options: str) -> tuple[asyncio.subprocess.Process, list[str], list[int]]:
    """Start `slackline up`: the process, the lines it printed until it was ready, its children."""
    process = await asyncio.create_subprocess_exec(*UP, *options, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    lines = []
    async with asyncio.timeout(WAIT_S):
        while not lines or not lines[-1].startswith("stop"):
            line = await process.stdout.readline()
            assert line, lines
            lines.append(line.decode().rstrip())
    return process, lines, children_of(process.pid)


async def ended(
    process: asyncio.subprocess.Process, pids: list[int], lines: list[str] | None = None
) -> None:
    """Wait for the end, in order: no process and, without --store, no log is left."""
    assert await process.wait() == 0
    assert [pid for pid in pids if not gone(pid)] == []
    assert log_files(lines or []) == []


in_proc = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")


@in_proc
async def test_ctrl_c_stops_a_fleet_and_leaves_no_process_behind() -> None:
    process, lines, pids = await started()
    assert len(pids) == 7, "nats-server, admission, planner, relegation, two workers, gateway"
    assert any("nats://127.0.0.1:" in line for line in lines)
    assert any("http://127.0.0.1:" in line for line in lines)
    assert any(line.endswith("/console") for line in lines)
    assert not any("Bearer" in line for line in lines), "HTTP has no keys"
    assert len(log_files(lines)) == 7
    process.send_signal(signal.SIGINT)
    await ended(process, pids, lines)


@in_proc
async def test_ctrl_c_before_it_is_ready_is_answered_at_once_and_leaves_no_process_behind() -> None:
    process = await asyncio.create_subprocess_exec(*UP, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"starting")
    wait_for(lambda: bool(children_of(process.pid)), WAIT_S)
    pids = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    told = (await process.stdout.read()).splitlines()
    assert told[0] == b"stopping before the fleet is ready (Ctrl-C again stops at once)"
    await ended(process, pids)


@pytest.mark.slow
@in_proc
async def test_a_second_ctrl_c_waits_for_nobody() -> None:
    process, lines, pids = await started()
    assert process.stdout is not None
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # none of them would end by itself
    process.send_signal(signal.SIGINT)
    told = [await process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    told += (await process.stdout.read()).splitlines()
    assert [line.split()[0].strip(b":") for line in told] == [b"stopping", b"stopped"]
    await ended(process, pids, lines)


async def test_a_fleet_that_stops_in_order_logs_no_error(tmp_path: Path) -> None:
    async with Fleet(FleetSpec(store=tmp_path)) as fleet:
        pass
    for child in fleet.processes:
        assert '"level":"error"' not in child.output(), child.name


async def test_commands_of_the_same_user_need_no_url_and_no_key_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    process, lines, _ = await started()
    url = next(word for line in lines for word in line.split() if word.startswith("nats://"))
    note = tmp_path / "slackline" / f"up-{url.rpartition(':')[2]}.json"
    gateway = next(file for file in log_files(lines) if file.stem == "gateway")
    first = json.loads(gateway.read_text().splitlines()[0])
    connected_unix_s = datetime.fromisoformat(first["at"]).timestamp()
    assert note.stat().st_mtime < connected_unix_s, "who sees HTTP answer may ask at once"
    submit = (*LOADGEN, "submit", "hello", "--max-tokens", "2")
    for more in ((), ("--tenant", "another", "--url", url)):
        asked = await asyncio.create_subprocess_exec(*submit, *more)
        assert await asked.wait() == 0
    assert "user.nk" in note.read_text()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0
    assert not note.exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is there only on Linux")
async def test_a_fleet_that_is_killed_takes_its_processes_along(tmp_path: Path) -> None:
    process, _, pids = await started("--store", str(tmp_path))
    process.kill()
    await process.wait()
    for pid in pids:
        wait_for(lambda: gone(pid), WAIT_S)  # noqa: B023 - called at once


async def test_a_policy_that_the_environment_names_wrongly_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fleet = Fleet(FleetSpec(environment={"SLACKLINE_POLICY": "no-such"}))
    with pytest.raises(ConfigError, match="no policy is called 'no-such'"):
        async with fleet:
            pass
    assert fleet.processes == []
    assert list(tmp_path.iterdir()) == []


async def test_a_fleet_that_cannot_start_says_why_and_leaves_no_process_behind(
    tmp_path: Path,
) -> None:
    fleet = Fleet(FleetSpec(profile="no-such-profile", store=tmp_path))
    with pytest.raises(ChildError, match=r"at its start: worker: .*no-such-profile"):
        await fleet.__aenter__()
    assert [c.name for c in fleet.processes if c.pid is not None] == []


async def test_replicas_take_the_pools_of_their_policy_in_turn_and_each_pool_serves() -> None:
    spec = FleetSpec(replicas=3, policy="ascendra", pace=0.2, gateway=False, drain_s=1.0)
    digests: dict[str, Digest] = {}
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        await bus.subscribe(
            subjects.DIGESTS, Digest, lambda digest, _: digests.update({digest.replica: digest})
        )
        requests = draw_requests(SEED, 6, prompt=(200, 400), output=(5, 20))
        asked = [ask(client, request, "chat") for request, _ in requests]
        await check(bus, wire, await asyncio.gather(*asked))
        async with asyncio.timeout(WAIT_S):
            while len(digests) < 3:
                await asyncio.sleep(0.05)
    assert (
        {replica: digest.pool for replica, digest in digests.items()}
        == {"r1": "lp", "r2": "hp", "r3": "lp"}
        == fleet.pools
    )


async def test_a_process_that_dies_is_started_again_however_often_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(child_module, "LONGEST_BACKOFF_S", 0.01)
    mended = tmp_path / "mended"
    program = f"import os, sys, time; os.path.exists({str(mended)!r}) or sys.exit('my reason')"
    notices: list[str] = []

    def notice(line: str) -> None:
        notices.append(line)
        if len(notices) == 8:
            mended.touch()

    child = Child(
        "broken",
        [sys.executable, "-c", f"{program}; time.sleep(600)"],
        os.environ,
        tmp_path / "log",
        notice,
    )
    keeping = asyncio.ensure_future(child.keep())
    with pytest.raises(ChildError, match="my reason"):
        await keeping
    child.patient = True
    keeping = asyncio.ensure_future(child.keep())
    async with asyncio.timeout(WAIT_S):
        while child.pid is None or len(notices) < 8:
            await asyncio.sleep(0.01)
    assert (len(notices), child.starts) == (8, 1 + 8 + 1)
    child.abandon()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
