"""Tests of `slackline chat` and `slackline submit` on a running fleet: answers and latencies."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared.bus.users import Role, User

pytestmark = pytest.mark.asyncio(loop_scope="module")
WITHIN_S = 120.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    spec = FleetSpec(
        replicas=1, pace=0.2, gateway=False, store=tmp_path_factory.mktemp("fleet"), drain_s=2.0
    )
    async with Fleet(spec) as fleet:
        yield fleet


async def begun(command: str, fleet: Fleet, *words: str) -> asyncio.subprocess.Process:
    """A command of `slackline` that is started on the fleet."""
    pipe = asyncio.subprocess.PIPE
    access = fleet.access(User(Role.TENANT, "default"))
    words = (sys.executable, "-m", "loadgen", command, *words, "--url", access.url)
    login = {"SLACKLINE_CREDS": access.creds, "SLACKLINE_TLS_CA": access.tls_ca}
    return await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env={**os.environ, **login}
    )


async def ended(
    process: asyncio.subprocess.Process, lines: str = ""
) -> tuple[int | None, str, str]:
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate(lines.encode())
    return process.returncode, out.decode(), err.decode()


async def test_a_conversation_shows_each_answer_with_its_ttft_its_pace_and_the_tier_used(
    fleet: Fleet,
) -> None:
    lines = "Hello there\n/tier interactive\nAnd now?\n/nonsense\n/quit\nnever asked\n"
    code, out, err = await ended(await begun("chat", fleet, "--max-tokens", "20"), lines)
    assert code == 0, err
    first, taken, second, *rest = err.splitlines()
    assert first.startswith("[chat: standard, "), err
    assert ", TTFT " in first
    assert taken == "(tier interactive from now on)"
    assert second.startswith("[interactive: standard, "), err
    assert "20 tokens at" in first
    assert "/nonsense" in rest[0]
    assert len(rest) == 1
    assert len(out.splitlines()) == 2


async def test_the_same_seed_and_words_give_the_same_conversation(fleet: Fleet) -> None:
    both = ("--max-tokens", "8", "--seed", "7")
    code, plain, err = await ended(await begun("chat", fleet, *both), "one\ntwo\n")
    assert code == 0, err
    code, again, err = await ended(await begun("chat", fleet, *both), "one\ntwo\n")
    assert (code, again) == (0, plain), err


async def test_an_unknown_tier_is_a_sentence_and_the_conversation_goes_on(fleet: Fleet) -> None:
    code, _, err = await ended(
        await begun("chat", fleet, "--max-tokens", "4"), "/tier nosuch\nhello\n"
    )
    refused, answered = err.splitlines()  # it is refused when it is typed, and the tier stays
    assert refused == "unknown tier `nosuch`; known: interactive, chat, summary, batch"
    assert answered.startswith("[chat: standard")
    assert code == 0


async def test_ctrl_c_stops_the_answer_and_not_the_conversation(fleet: Fleet) -> None:
    process = await begun("chat", fleet, "--max-tokens", "1500", "--tier", "batch")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"a long story\n")
    async with asyncio.timeout(WITHIN_S):
        assert await process.stdout.read(1), "it has begun to speak"
        process.send_signal(signal.SIGINT)
        process.stdin.write(b"/tier chat\nshort\n")
        process.stdin.write_eof()
        err = (await process.stderr.read()).decode() if process.stderr is not None else ""
        await process.wait()
    assert "stopped" in err
    assert err.count("[chat: ") == 1, "the second question was answered"
    assert "[batch: " not in err
    assert "Traceback" not in err


async def test_an_id_used_before_is_attached_to_and_its_first_times_are_told(fleet: Fleet) -> None:
    words = ("tell me", "--request-id", "twice", "--max-tokens", "30", "--json")
    code, out, err = await ended(await begun("submit", fleet, *words))
    assert code == 0, err
    first = json.loads(out)
    assert first["tier"] == "chat"
    code, out, err = await ended(await begun("submit", fleet, *words))
    assert code == 0, err
    second = json.loads(out)
    assert second["tokens"] == first["tokens"]
    assert (first["attached"], second["attached"]) == (False, True)
    assert second["ttft_s"] == first["verdict"]["ttft_s"]
    assert "attached to an earlier request" in err


@pytest.mark.slow
async def test_without_a_tier_a_fleet_with_tiers_of_its_own_takes_its_default_one(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slackline.toml"
    file.write_text(
        "default_tier = 'prose'\n[tiers.code]\nslo = { ttft_s = 9 }\n"
        "[tiers.prose]\nslo = { ttlt_s = 99 }\n"
    )
    configured = {"SLACKLINE_CONFIG": str(file)}
    async with Fleet(
        FleetSpec(replicas=1, pace=0.2, gateway=False, drain_s=2.0, environment=configured)
    ) as other:
        code, out, err = await ended(
            await begun("submit", other, "hello", "--max-tokens", "4", "--json")
        )
        assert code == 0, err
        assert json.loads(out)["tier"] == "prose"
        assert err.startswith("prose, standard, ")
        code, _, err = await ended(await begun("chat", other, "--max-tokens", "4"), "hello\n")
        assert code == 0, err
        assert err.startswith("[prose: standard, ")
        code, _, err = await ended(await begun("submit", other, "hello", "--tier", "interactive"))
        assert code == 1, "a tier that was named is not replaced by another"
        assert "unknown tier `interactive`" in err


async def test_without_a_fleet_the_answer_says_what_to_do(tmp_path: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-m", "loadgen", "chat", "--url", "nats://127.0.0.1:1")
    process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, stderr=pipe)
    code, _, err = await ended(process, "hello\n")
    assert code == 1
    assert "slackline up" in err
