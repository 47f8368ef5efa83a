"""Tests of `slackline demo`: it runs real processes under both policies and leaves none behind."""

import asyncio
import re
import signal
import sys
from pathlib import Path

import pytest

from loadgen.demo.prompts import Prompts
from loadgen.demo.rush import capacity_per_s
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.report import read_report
from loadgen.load.workload import named_workload
from shared.perf import profile_file as profiles
from shared.rules.tiers import load_tiers
from shared.text.tokenizer import Tokenizer

DEMO = (sys.executable, "-m", "loadgen", "demo", "--quick")
WITHIN_S = 300.0  # it takes 30 s on a quiet machine


def descendants(pid: int) -> set[int]:
    """All living descendants of a process."""
    found: set[int] = set()
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(word) for task in tasks for word in (task / "children").read_text().split()]
    except OSError:
        return found
    for child in children:
        found |= {child} | descendants(child)
    return found


def alive(pid: int) -> bool:
    """True if the process runs; a zombie does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


async def begun(out: Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *DEMO, "--out", str(out), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )


async def seen_below(process: asyncio.subprocess.Process) -> set[int]:
    """Every descendant that the process had while it ran."""
    seen: set[int] = set()
    while process.returncode is None:
        seen |= descendants(process.pid)
        await asyncio.sleep(0.1)
    return seen


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_the_short_demonstration_shows_both_policies_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    process = await begun(tmp_path)
    watching = asyncio.create_task(seen_below(process))
    async with asyncio.timeout(WITHIN_S):
        output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    seen = await watching
    assert len(seen) >= 12, "two fleets of six processes each"
    assert [pid for pid in seen if alive(pid)] == []
    assert "\x1b" not in text, "no terminal, no colours"
    assert "fcfs chunk" in text
    assert re.search(r"Other work used \d+ % of this machine's cores before", text)
    assert "SLO met, all requests" in text
    fcfs, slackline = (read_report(tmp_path / f"{policy}.json") for policy in ("fcfs", "slackline"))
    assert fcfs.total.offered == slackline.total.offered == fcfs.planned
    assert fcfs.total.finished == slackline.total.finished == fcfs.planned, text


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_ctrl_c_in_the_middle_of_it_stops_everything(tmp_path: Path) -> None:
    process = await begun(tmp_path)
    watching = asyncio.create_task(seen_below(process))
    async with asyncio.timeout(WITHIN_S):
        assert process.stdout is not None
        while b"starting nats-server" not in (line := await process.stdout.readline()):
            assert line, "it ended before its first fleet"
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
    assert process.returncode == 130, output.decode()
    assert "Traceback" not in output.decode()
    assert [pid for pid in await watching if alive(pid)] == []
    assert not (tmp_path / "slackline.json").exists()


@pytest.mark.parametrize("tokens", [1, 20, 47, 48, 500, 2048])
def test_prompts_are_real_text_of_exactly_the_length_that_was_planned(tokens: int) -> None:
    tokenizer = Tokenizer.builtin()
    prompts = Prompts(tokenizer, seed=3)
    planned = PlannedRequest(7, 0.0, tokens, 1, "batch", 1.0, "default", "app")
    ids = prompts.ids(planned)
    assert len(ids) == tokens
    assert ids == Prompts(tokenizer, seed=3).ids(planned), "the same request has the same prompt"
    if tokens >= 500:
        assert ids != prompts.ids(planned._replace(number=8))
        text = bytes(token for token in ids if token < 256).decode()
        assert "Summarise this:" in text
        assert text.endswith("assistant\n")


def test_the_rush_offers_what_the_engines_keep_up_with() -> None:
    """By simulation two A100s with Llama-3-8B serve about 8 requests/s of the full-length mix."""
    requests = plan_requests(
        [0.1 * n for n in range(2000)], named_workload("mix", 8192), load_tiers("demo-3"), seed=1
    )
    assert 3.5 < capacity_per_s(profiles.load("a100-llama3-8b"), requests) < 4.5
