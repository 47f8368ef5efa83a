"""Tests of `/console`, `slackline status`, `top` and other commands on a real fleet with keys."""

import asyncio
import json
import os
import pty
import signal
import sys
import termios
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from msgspec.structs import replace

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.trace import read_trace
from services.worker.engines.make import SIM_PROFILE
from shared import subjects
from shared.console.picture import LifePicture, Picture, WhyPicture, why_picture
from shared.perf import profile_file as store
from shared.schemas import Explain, Explanation, GenerateRequest, Sampling
from tests.fleet.live import HOPELESS, WAIT_S, ask, client_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHORT = Sampling(max_tokens=50, output_tokens=50)
LONG = Sampling(max_tokens=7000, output_tokens=7000)  # it runs as long as the test


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    async with Fleet(FleetSpec(replicas=2, pace=2.0, draft=0.125)) as fleet:
        yield fleet


def request(name: str, **facts: Any) -> GenerateRequest:
    usual: dict[str, Any] = {"prompt": 20 * "What is a river? ", "sampling": SHORT}
    return GenerateRequest(request_id=name, tenant="default", **{**usual, **facts})


async def seen(http: httpx.AsyncClient, wanted: Callable[[Picture], bool]) -> Picture:
    """Wait for a picture, the state of the fleet that the console draws, with what is wanted."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await http.get("/console/picture")
            assert answer.status_code == 200, answer.text
            picture = msgspec.json.decode(answer.content, type=Picture)
            if wanted(picture):
                return picture
            await asyncio.sleep(0.1)


async def started(fleet: Fleet, *words: str) -> asyncio.subprocess.Process:
    """Start a `slackline` command as this fleet's operator."""
    access = fleet.access()
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", *words, "--url", access.url,
        "--creds", access.creds, "--tls-ca", access.tls_ca,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def said(fleet: Fleet, *words: str) -> tuple[int | None, str, str]:
    """The exit status of a command, its output and its errors."""
    process = await started(fleet, *words)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def status(fleet: Fleet, *words: str) -> tuple[int | None, str]:
    code, out, _ = await said(fleet, "status", *words)
    return code, out


async def test_the_console_shows_requests_that_run_their_iterations_and_their_ends(
    fleet: Fleet,
) -> None:
    async with (
        client_of(fleet) as (bus, client, wire),
        httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
    ):
        # some run before anybody looks: their planners say what they are
        running = [
            asyncio.ensure_future(ask(client, request(f"long-{n}", sampling=LONG), "chat"))
            for n in range(2)
        ]
        await wire.until_speaking(2)
        # and some come later
        later = request("long-2", sampling=LONG)
        running.append(asyncio.ensure_future(ask(client, later, "interactive")))
        wanted = {f"default.long-{n}" for n in range(3)}
        picture = await seen(http, lambda p: wanted <= {r.key for r in p.requests})
        rows = {r.key: r for r in picture.requests if r.key in wanted}
        assert {r.tier for r in rows.values()} == {"chat", "interactive"}
        assert {r.replica for r in rows.values()} <= {"r1", "r2"}
        picture = await seen(http, lambda p: sum(len(r.iterations) for r in p.replicas) > 20)
        iterations = [i for r in picture.replicas for i in r.iterations]
        assert all(i.exec_s > 0 for i in iterations)
        assert sum(i.predicted_s > 0 for i in iterations) > len(iterations) / 2

        asked = [request(f"more-{n}", slo=HOPELESS if n == 5 else None) for n in range(6)]
        # the relegated one may take longer than the gateway listens without a question
        delivering = asyncio.gather(*(ask(client, one, "interactive") for one in asked))

        def offered(picture: Picture) -> int:
            return sum(tier.offered for tier in picture.tiers if tier.name == "interactive")

        picture = await seen(http, lambda p: offered(p) >= len(asked))
        delivered = await delivering
        interactive = next(tier for tier in picture.tiers if tier.name == "interactive")
        met = sum(one.verdict is not None and one.verdict.slo_met for one in delivered)
        assert interactive.met == met
        assert interactive.relegated >= 1
        assert interactive.tbt.p50_s is not None and interactive.ttft.p50_s is not None

        answer = await http.get("/console/request", params={"key": "default.more-0"})
        life = msgspec.json.decode(answer.content, type=LifePicture)
        assert life.whole and life.ended and life.generated_tokens == 50
        assert sum(n for _, n in life.chunks) >= life.prompt_tokens
        times = [at for at, _ in life.tokens]
        assert times == sorted(times)
        # why one was late, as `slackline explain` says it
        late = {"key": "default.more-5"}
        why = msgspec.json.decode(
            (await http.get("/console/why", params=late)).content, type=WhyPicture
        )
        assert why.until_late and "late" in why.answer
        assert sum(part for _, _, part in why.shares) == pytest.approx(1.0)
        question = Explain(request_id="more-5")
        explained = await bus.request(
            subjects.explain("default"), question, Explanation, timeout_s=WAIT_S
        )
        assert why == why_picture(explained)
        code, out, err = await said(fleet, "explain", "more-5", "--operator")
        assert code == 0 and " ".join(out.split()).startswith(f"more-5: {why.answer}"), err
        # what a client wrote or read is nowhere
        for page in ("/console", "/console/picture", "/console/request?key=default.more-0"):
            assert "river" not in (await http.get(page)).text
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_status_says_that_a_fleet_works(fleet: Fleet) -> None:
    code, text = await status(fleet)
    assert code == 0, text
    assert "the fleet takes requests" in text and "r2" in text
    code, text = await status(fleet, "--json")
    found = json.loads(text)
    assert code == 0 and found["working"] and found["silent"] == []
    assert [r["name"] for r in found["fleet"]["replicas"]] == ["r1", "r2"]


@pytest.mark.slow
async def test_the_profile_of_a_worker_can_be_kept_in_a_file(fleet: Fleet, tmp_path: Path) -> None:
    kept = tmp_path / "mine.json"
    code, out, err = await said(fleet, "profile", "running", "--replica", "r2", "--out", str(kept))
    assert code == 0, err
    assert f"wrote {kept}, the profile of r2" in out
    ours, theirs = store.read(str(kept)), store.read(SIM_PROFILE)
    assert replace(ours, draft=theirs.draft) == theirs
    assert ours.draft == 0.125  # what its worker announces
    code, out, err = await said(fleet, "profile", "running", "--json")
    assert code == 0 and json.loads(out)["name"] == SIM_PROFILE
    code, out, err = await said(fleet, "profile", "running", "--replica", "r3")
    assert code == 2 and "r1, r2" in err and len(err.splitlines()) == 1


@pytest.mark.slow
async def test_what_a_fleet_serves_is_recorded_as_a_trace(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "größe 1.csv.gz"
    process = await started(fleet, "record", "--out", str(path))
    async with client_of(fleet) as (_, client, _):
        async with asyncio.timeout(WAIT_S):
            while not path.exists():  # it listens before it makes the file
                await asyncio.sleep(0.05)
        asked = [
            (request("recorded-1"), "interactive"),
            (request("recorded-2", sampling=Sampling(max_tokens=7, output_tokens=7)), "batch"),
        ]
        answers = await asyncio.gather(*(ask(client, *each) for each in asked))
    prompts = [answer.verdict.prompt_tokens for answer in answers if answer.verdict is not None]
    assert process.stderr is not None
    async with asyncio.timeout(WAIT_S):
        while b"2 requests" not in await process.stderr.readline():
            pass
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    assert process.returncode == 0, err
    assert err.decode().splitlines()[-1] == f"{path}: 2 requests"
    rows = [(row.prompt_tokens, row.output_tokens, row.tier) for row in read_trace(path).rows]
    assert sorted(rows) == sorted([(prompts[0], 50, "interactive"), (prompts[1], 7, "batch")])


async def test_a_recording_leaves_what_is_there_alone_while_no_fleet_is_heard(
    tmp_path: Path,
) -> None:
    path = tmp_path / "load.csv"
    path.write_text("precious")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "record", "--out", str(path), "--url", "nats://127.0.0.1:1",
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 1 and b"slackline up" in err
    assert path.read_text() == "precious"


@pytest.mark.slow
async def test_top_shows_the_fleet_until_q_is_pressed(fleet: Fleet) -> None:
    access, (ours, its) = fleet.access(), pty.openpty()
    termios.tcsetwinsize(its, (40, 80))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "top", "--url", access.url,
        "--creds", access.creds, "--tls-ca", access.tls_ca,
        stdin=its, stdout=its, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    shown = b""
    async with asyncio.timeout(WAIT_S):
        while b"on 2 of 2 replicas" not in shown:
            shown += await asyncio.to_thread(os.read, ours, 65536)
        os.write(ours, b"q")
        assert await process.wait() == 0
    os.close(its)
    os.close(ours)


async def test_top_without_a_terminal_says_what_to_do() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "top",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, err = await process.communicate()
    assert process.returncode == 2 and b"slackline status" in err
