"""A fleet of real processes on a real nats-server: up, answering, refusing, cancelling, down."""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from loadgen.fleet import child as child_module
from loadgen.fleet.child import Child, ChildError
from loadgen.fleet.fleet import Fleet, FleetSpec
from services.gateway.api.translate import id_of_choice
from shared import subjects
from shared.bus.api import Call, RefusedError
from shared.bus.nats import NatsBus
from shared.bus.users import Role, User
from shared.errors import ConfigError, PeerError
from shared.rules import http_keys
from shared.schemas import (
    Announce,
    Delta,
    Digest,
    GenerateRequest,
    Offer,
    Sampling,
    Withdraw,
    Withdrawn,
)
from shared.subjects import request_key
from shared.vocabulary import FinishReason, ReplicaId, ServiceClass, Slo
from tests.fleet.live import (
    HOPELESS,
    WAIT_S,
    ask,
    check,
    client_of,
    connect_raw,
    draw_requests,
    replay_of,
    until_idle,
)
from tests.fleet.processes import children_of, gone, wait_for

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON = {"Content-Type": "application/json"}
SEED = 20_261_120
UP = (
    sys.executable,
    "-m",
    "loadgen",
    "up",
    "--port",
    "0",
    "--http-port",
    "0",
    "--engine",
    "sim",
    "--pace",
    "0.2",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(
        FleetSpec(pace=0.2, store=tmp_path_factory.mktemp("fleet"), drain_s=2.0)
    ) as fleet:
        yield fleet
        assert [c.name for c in fleet.processes if c.starts != 1] == [], (
            "a client's messages ended a service"
        )


# ---------------------------------------------------------------- up and down


def log_files(lines: list[str]) -> list[Path]:
    """The files in the folder that `slackline up` named."""
    folder = Path(next(line.split()[-1] for line in lines if line.split()[0] == "logs"))
    return sorted(folder.iterdir()) if folder.exists() else []


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


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_ctrl_c_stops_a_fleet_and_leaves_no_process_behind() -> None:
    process, lines, pids = await started()
    assert len(pids) == 7, "nats-server, admission, planner, relegation, two workers, gateway"
    assert any("nats://127.0.0.1:" in line for line in lines)
    assert any("http://127.0.0.1:" in line for line in lines)
    assert any(line.endswith("/console") for line in lines)
    assert not any("Bearer" in line for line in lines), "HTTP has no keys"
    assert len(log_files(lines)) == 7
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0
    assert [pid for pid in pids if not gone(pid)] == []
    assert log_files(lines) == [], "without --store nothing is kept"


@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_ctrl_c_before_it_is_ready_is_answered_at_once_and_leaves_no_process_behind() -> None:
    process = await asyncio.create_subprocess_exec(*UP, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"starting")
    wait_for(lambda: bool(children_of(process.pid)), WAIT_S)
    pids = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    told = (await process.stdout.read()).splitlines()
    assert await process.wait() == 0
    assert told == [
        b"stopping before the fleet is ready (Ctrl-C again stops at once)",
        b"stopped before the fleet was ready",
    ]
    assert [pid for pid in pids if not gone(pid)] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_a_second_ctrl_c_waits_for_nobody() -> None:
    process, lines, pids = await started()
    assert process.stdout is not None
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # none of them would end by itself
    process.send_signal(signal.SIGINT)
    told = [await process.stdout.readline()]
    process.send_signal(signal.SIGINT)
    told += (await process.stdout.read()).splitlines()
    assert await process.wait() == 0
    assert told[0].startswith(b"stopping"), told
    assert told[1:] == [b"stopped at once: every process was killed"]
    assert [pid for pid in pids if not gone(pid)] == []
    assert log_files(lines) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
async def test_a_closed_terminal_stops_a_fleet_and_leaves_no_process_behind() -> None:
    # under nohup SIGHUP is ignored, and a child would ignore it too; of a handler it gets nothing
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        process, lines, pids = await started()
    finally:
        signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert await process.wait() == 0
    assert [pid for pid in pids if not gone(pid)] == []
    assert log_files(lines) == []


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
    submit = (sys.executable, "-m", "loadgen", "submit", "hello", "--max-tokens", "2")
    for more in ((), ("--tenant", "another", "--url", url)):
        asked = await asyncio.create_subprocess_exec(*submit, *more)
        assert await asked.wait() == 0
    assert "user.nk" in note.read_text()
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0
    assert not note.exists()


@pytest.mark.slow
async def test_the_first_lines_say_what_keys_of_http_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keys").write_text(http_keys.line_of("acme", http_keys.new_key()))
    monkeypatch.setenv("SLACKLINE_GATEWAY_KEYS", str(tmp_path / "keys"))
    process, lines, _ = await started("--replicas", "1")
    process.send_signal(signal.SIGINT)
    assert "        console off: it needs console_keys of its own" in lines
    (curl,) = [line for line in lines if line.lstrip().startswith("curl")]
    assert '-H "Authorization: Bearer KEY" -d' in curl
    assert await process.wait() == 0


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
        await check(
            bus,
            wire,
            await asyncio.gather(*(ask(client, request, "chat") for request, _ in requests)),
        )
        async with asyncio.timeout(WAIT_S):
            while len(digests) < 3:
                await asyncio.sleep(0.05)
    assert (
        {replica: digest.pool for replica, digest in digests.items()}
        == {"r1": "lp", "r2": "hp", "r3": "lp"}
        == fleet.pools
    )


async def test_each_offer_says_how_many_more_replicas_may_be_asked() -> None:
    """A request that none can hold in time is offered to all three, and then to the pool."""
    spec = FleetSpec(replicas=3, pace=0.2, gateway=False, drain_s=1.0)
    left: list[int] = []

    def see(offer: Offer, _: Call) -> None:
        if offer.service_class is ServiceClass.STANDARD:
            left.append(offer.hops_left)

    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        await bus.subscribe(subjects.offer(ReplicaId(subjects.EVERY)), Offer, see)
        await bus.flush(WAIT_S)
        sampling = Sampling(max_tokens=8, ignore_eos=True)
        request = GenerateRequest(
            request_id="hops-1", prompt="hello", sampling=sampling, slo=HOPELESS
        )
        async with asyncio.timeout(WAIT_S):
            delivered = await ask(client, request)
            while len(left) < 3:
                await asyncio.sleep(0.05)
        await check(bus, wire, [delivered])
    assert left == [2, 1, 0]


async def test_two_fleets_never_share_a_store(fleet: Fleet) -> None:
    with pytest.raises(ConfigError, match="in use"):
        await Fleet(FleetSpec(store=fleet.spec.store)).__aenter__()


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


# ---------------------------------------------------------------- answers


async def test_a_request_over_nats_is_answered_in_messagepack_and_attached_to_after_its_end(
    fleet: Fleet,
) -> None:
    async with client_of(fleet) as (bus, client, wire):
        request = GenerateRequest(
            request_id="msgpack-1",
            prompt="Why is the sky blue?",
            sampling=Sampling(max_tokens=40, ignore_eos=True),
        )
        delivered = await ask(client, request)
        await check(bus, wire, [delivered])
        again = await client.submit(request, "chat")
        assert again.received is not None
        assert again.received.attached
        tokens: list[int] = []
        async for event in again:
            tokens += getattr(event, "tokens", [])
        assert tokens == delivered.tokens
        assert await again.wait() == delivered.verdict
        assert len(delivered.tokens) == 40


async def test_another_request_under_a_used_id_is_a_conflict_over_nats_and_http_alike(
    fleet: Fleet,
) -> None:
    first: dict[str, Any] = {"prompt": "one", "max_tokens": 9, "seed": 1, "ignore_eos": True}
    async with (
        httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
        client_of(fleet) as (_, client, _),
    ):

        async def post(request_id: str, **changed: object) -> httpx.Response:
            headers = {"idempotency-key": request_id}
            return await http.post("/v1/completions", json=first | changed, headers=headers)

        answer = (await post("used-1")).json()
        for changed in (
            {"prompt": "two"},
            {"max_tokens": 8},
            {"seed": 2},
            {"service_tier": "flex"},
        ):
            refused = await post("used-1", **changed)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
        again = (await post("used-1")).json()
        assert again["choices"] == answer["choices"], "the same request is a retry"
        request = GenerateRequest(request_id="used-2", prompt="one")
        delivered = await ask(client, request)
        for other in (
            msgspec.structs.replace(request, prompt="two"),
            msgspec.structs.replace(request, slo=Slo(ttft_s=9.0)),
            msgspec.structs.replace(request, sampling=Sampling(temperature=0.5)),
            msgspec.structs.replace(request, allow_relegation=False),
        ):
            with pytest.raises(PeerError) as conflict:
                await client.submit(other, "chat")
            assert (conflict.value.code, conflict.value.param) == ("conflict", "request_id")
        later = msgspec.structs.replace(request, importance=2.0, expires_s=9.0, session="s")
        assert (await ask(client, later)).text == delivered.text


async def until_stored(bus: NatsBus, request_id: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(RefusedError):
                await replay_of(bus, GenerateRequest(request_id=request_id))
                return
            await asyncio.sleep(0.02)


async def test_a_conflict_ends_nothing_of_the_request_that_has_the_id(fleet: Fleet) -> None:
    """Two prompts under an id of which only the second is the same as in the first request."""
    first = {"prompt": ["a", "b"], "max_tokens": 600, "ignore_eos": True}
    headers = {"idempotency-key": "used-3"}
    async with httpx.AsyncClient(
        base_url=fleet.http_url, timeout=WAIT_S, trust_env=False, headers=headers
    ) as http:
        running = asyncio.create_task(http.post("/v1/completions", json=first))
        async with client_of(fleet) as (bus, _, _):
            for name in ("used-3", id_of_choice("used-3", 1)):
                await until_stored(bus, name)
        refused = await http.post("/v1/completions", json=first | {"prompt": ["c", "b"]})
        assert refused.status_code == 409
        answer = (await running).json()
        assert [c["finish_reason"] for c in answer["choices"]] == ["length", "length"]


async def test_the_verdict_of_a_request_that_thinks_says_how_long_it_thought(fleet: Fleet) -> None:
    """A simulated engine has no token that ends the thinking: the sampling says when it ends."""
    slo = Slo(ttft_s=600.0, thinking_tbt_s=50.0, tbt_s=100.0)  # no machine is too slow
    async with client_of(fleet) as (_, client, _wire):
        for thinking in (0, 6, 20):
            sampling = Sampling(max_tokens=20, thinking_tokens=thinking, ignore_eos=True)
            delivered = await ask(
                client,
                GenerateRequest(
                    request_id=f"thinks-{thinking}", prompt="Why?", sampling=sampling, slo=slo
                ),
            )
            assert delivered.verdict is not None
            assert (
                delivered.verdict.thinking_tokens,
                delivered.verdict.output_tokens,
                delivered.verdict.slo_met,
            ) == (thinking, 20, True)
            assert (delivered.verdict.thinking_tpot_s is not None) == (thinking > 1)


async def test_ids_that_are_used_twice_at_once_run_once(fleet: Fleet) -> None:
    async with client_of(fleet) as (_, client, wire):
        request = GenerateRequest(
            request_id="twice-1",
            prompt="one run",
            sampling=Sampling(max_tokens=30, ignore_eos=True),
        )
        async with client_of(fleet) as (_, other, others):
            first, second = await asyncio.gather(ask(client, request), ask(other, request))
        assert first.tokens == second.tokens
        assert first.text == second.text
        assert first.verdict == second.verdict
        assert first.verdict is not None
        events = [
            event for each in (wire, others) for events in each.events.values() for event in events
        ]
        spoke = {event.attempt for event in events if isinstance(event, Delta)}
        assert spoke == {first.verdict.attempts}, (
            "an attempt that was declined for the other's sake never speaks"
        )


async def test_a_request_over_nats_in_json_is_answered_in_json(fleet: Fleet) -> None:
    raw = await connect_raw(fleet)
    events: list[dict[str, Any]] = []
    ended = asyncio.Event()

    async def on_event(msg: Any) -> None:
        events.append(json.loads(msg.data))
        if events[-1]["type"] == "end":
            ended.set()

    inbox = raw.new_inbox()
    await raw.subscribe(inbox, cb=on_event)
    body = {
        "request_id": "json-1",
        "prompt": "é" * 20,
        "inbox": inbox,
        "sampling": {"max_tokens": 25, "ignore_eos": True},
    }
    answer = await raw.request(
        "slo.v1.requests.default.chat", json.dumps(body).encode(), headers=JSON, timeout=WAIT_S
    )
    assert json.loads(answer.data)["type"] == "received"
    async with asyncio.timeout(WAIT_S):
        await ended.wait()
    replay = json.loads(
        (
            await raw.request(
                "slo.v1.attach.default", b'{"request_id": "json-1"}', headers=JSON, timeout=WAIT_S
            )
        ).data
    )
    deltas = [event for event in events if event["type"] == "delta"]
    assert [t for d in deltas for t in d["tokens"]] == replay["tokens"]
    assert "".join(d["text"] for d in deltas) == replay["text"]
    assert events[-1]["verdict"] == replay["verdict"]
    assert len(replay["tokens"]) == 25
    await raw.close()


async def test_a_request_over_http_is_answered_whole_and_streamed_with_the_text_of_the_log(
    fleet: Fleet,
) -> None:
    async with (
        client_of(fleet) as (bus, _, _wire),
        httpx.AsyncClient(base_url=fleet.http_url, trust_env=False, timeout=WAIT_S) as http,
    ):
        body = {"prompt": "Why is the sky blue?", "max_tokens": 30, "ignore_eos": True}
        whole = await http.post("/v1/completions", json=body, headers={"idempotency-key": "http-1"})
        assert whole.status_code == 200, whole.text
        replay = await replay_of(bus, GenerateRequest(request_id="http-1"))
        assert whole.json()["choices"][0]["text"] == replay.text
        assert whole.json()["usage"]["completion_tokens"] == 30
        text = ""
        async with http.stream(
            "POST",
            "/v1/completions",
            json=body | {"stream": True},
            headers={"idempotency-key": "http-2"},
        ) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    text += "".join(
                        choice["text"]
                        for choice in json.loads(line.removeprefix("data: "))["choices"]
                    )
        assert text == (await replay_of(bus, GenerateRequest(request_id="http-2"))).text
        assert text


async def test_a_cancelled_request_ends_as_cancelled_and_frees_what_it_held(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, _):
        request = GenerateRequest(
            request_id="cancel-1",
            prompt="a" * 500,
            sampling=Sampling(max_tokens=7000, ignore_eos=True),
        )
        handle = await client.submit(request, "chat")
        tokens = 0
        async with asyncio.timeout(WAIT_S):
            async for event in handle:
                tokens += len(getattr(event, "tokens", []))
                if tokens >= 3 and not handle.cancelling:
                    await handle.cancel()
        verdict = await handle.wait()
        assert verdict.finish_reason == "cancelled"
        assert verdict.output_tokens == tokens < 7000
        await until_idle(bus, fleet.replicas)


# ---------------------------------------------------------------- bad input


GARBAGE = Random(SEED).randbytes(2_000_000)
# The fields sent as JSON, and the code of the refusal; None: any code.
BAD_REQUESTS: dict[str, tuple[dict[str, Any], str | None]] = {
    "an id with *": ({"request_id": "a*"}, "invalid_id"),
    "an id with >": ({"request_id": ">"}, "invalid_id"),
    "an id with dots": ({"request_id": "a.b"}, "invalid_id"),
    "an empty id": ({"request_id": ""}, "invalid_id"),
    "an id of 65 characters": ({"request_id": "a" * 65}, "invalid_id"),
    "another tenant than that of the subject": ({"tenant": "acme"}, None),
    "no id": ({"request_id": None}, None),
    "an empty prompt": ({"prompt": ""}, None),
    "no prompt": ({"prompt": None}, None),
    "two prompts": ({"token_ids": [1]}, None),
    "a prompt that is a number": ({"prompt": 7}, None),
    "a prompt over the context": ({"prompt": "a" * 9000}, "context_length_exceeded"),
    "a prompt of half a surrogate pair": ({"prompt": "\ud800"}, None),
    "token ids outside the vocabulary": ({"prompt": None, "token_ids": [10**6]}, None),
    "token ids that are negative": ({"prompt": None, "token_ids": [-1]}, None),
    "messages of nothing": ({"prompt": None, "messages": []}, None),
    "messages without a role": ({"prompt": None, "messages": [{}]}, None),
    "messages that are numbers": ({"prompt": None, "messages": [1]}, None),
    "an unknown model": ({"model": "gpt-17"}, "model_not_found"),
    "a negative SLO": ({"slo": {"ttft_s": -1}}, None),
    "an SLO of zero": ({"slo": {"tbt_s": 0}}, None),
    "an SLO shorter than any iteration": ({"slo": {"tbt_s": 5e-324}}, None),
    "an SLO of nearly no zero-load time": ({"slo": {"ttft_x": 1e-323}}, None),
    "an SLO longer than a life": ({"slo": {"ttlt_s": 1e300}}, None),
    "an SLO of nothing": ({"slo": {}}, None),
    "an SLO of words": ({"slo": {"ttft_s": "soon"}}, None),
    "an unknown kind of SLO": ({"slo": {"ttfb_s": 1}}, None),
    "an unknown field": ({"temprature": 1}, None),
    "no tokens": ({"sampling": {"max_tokens": 0}}, None),
    "a negative temperature": ({"sampling": {"temperature": -1}}, None),
    "a seed beyond 64 bits": ({"sampling": {"seed": 10**30}}, None),
    "a stop token beyond 64 bits": ({"sampling": {"stop_token_ids": [10**30]}}, None),
    "importance beyond measure": ({"importance": 1e300}, None),
    "an inbox that is no inbox": ({"inbox": "slo.v1.leases"}, None),
    "an inbox with a wildcard": ({"inbox": "_INBOX.default.>"}, None),
    "an inbox of another tenant": ({"inbox": "_INBOX.acme.1"}, None),
    "an inbox of no tenant": ({"inbox": "_INBOX.1"}, None),
    "expiry in the past": ({"expires_s": -5}, None),
}


async def refused(
    raw: Any, subject: str, payload: bytes, headers: dict[str, str] | None = JSON
) -> dict[str, Any]:
    answer = await raw.request(subject, payload, headers=headers, timeout=WAIT_S)
    decode = json.loads if headers else msgspec.msgpack.decode
    refusal: dict[str, Any] = decode(answer.data)
    assert refusal["type"] == "refused", refusal
    assert refusal["message"]
    return refusal


async def test_a_worker_does_not_say_what_became_of_an_attempt_of_its_former_life(
    fleet: Fleet,
) -> None:
    """It would answer that it never had the attempt, and tokens that a client has would be lost."""
    key = request_key("default", f"former-{SEED}")
    former = Withdraw(key=key, attempt=1, incarnation="former")
    async with client_of(fleet) as (bus, _, _wire):
        with pytest.raises(PeerError, match="its log says"):
            await bus.request(subjects.withdraw(ReplicaId("r1")), former, Withdrawn, timeout_s=30.0)


@pytest.mark.parametrize("name", BAD_REQUESTS)
async def test_a_bad_request_is_refused_with_a_reason(fleet: Fleet, name: str) -> None:
    change, code = BAD_REQUESTS[name]
    raw = await connect_raw(fleet)
    body = {"request_id": "bad-1", "prompt": "hello"} | change
    payload = json.dumps({key: value for key, value in body.items() if value is not None}).encode()
    refusal = await refused(raw, "slo.v1.requests.default.chat", payload)
    assert code in (None, refusal["code"]), refusal
    await raw.close()


async def test_bytes_that_are_no_message_are_refused_and_the_fleet_goes_on(fleet: Fleet) -> None:
    raw = await connect_raw(fleet)
    worker = await connect_raw(fleet, User(Role.WORKER, "r1"))
    print(f"seed {SEED}")
    for asker, subject in (
        (raw, "slo.v1.requests.default.chat"),
        (raw, "slo.v1.attach.default"),
        (worker, "slo.v1.over.r1"),
    ):
        for headers in (None, JSON):
            for payload in (
                b"",
                b"\xc1",
                GARBAGE,
                b"[" * 100_000,
                b'{"request_id": 1}',
                b"\xff\xfe",
            ):
                await refused(asker, subject, payload, headers)
    await worker.close()
    refusal = await refused(
        raw, "slo.v1.requests.default.nosuch", b'{"request_id": "a", "prompt": "b"}'
    )
    assert refusal["code"] == "unknown_tier"
    refusal = await refused(raw, "slo.v1.attach.default", b'{"request_id": "never-seen"}')
    assert refusal["code"] == "not_found"
    # These subjects have no answers: nothing happens.
    for kind in (
        "plan",
        "hold",
        "offer",
        "acked",
        "refused",
        "digest",
        "announce",
        "resync",
        "withdraw",
        "holdings",
    ):
        await raw.publish(f"slo.v1.replica.r1.{kind}", GARBAGE)
        await raw.publish(
            f"slo.v1.replica.r1.{kind}", msgspec.msgpack.encode({"replica": "r1", "epoch": 10**6})
        )
    for subject in (
        "slo.v1.relegated",
        "slo.v1.cancel.default.nobody",
        "slo.v1.cancel.a b.c".replace(" ", "_"),
    ):
        await raw.publish(subject, GARBAGE)
    await raw.flush()
    async with client_of(fleet) as (bus, client, wire):
        delivered = await ask(
            client,
            GenerateRequest(
                request_id="after-garbage",
                prompt="still there?",
                sampling=Sampling(max_tokens=10, ignore_eos=True),
            ),
        )
        await check(bus, wire, [delivered])
    await raw.close()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("an infinite deadline", {"slo": {"ttft_s": math.inf, "tbt_s": math.inf}}),
        ("a stop string of nothing", {"sampling": {"max_tokens": 5, "stop": [""]}}),
        ("the largest seed", {"sampling": {"max_tokens": 5, "seed": 2**63 - 1}}),
        ("the smallest seed", {"sampling": {"max_tokens": 5, "seed": -(2**63)}}),
        ("the largest answer", {"prompt": "a" * 8190, "sampling": {"max_tokens": 1_000_000}}),
        (
            "a prompt of control characters",
            {"prompt": "".join(map(chr, range(32))), "sampling": {"max_tokens": 5}},
        ),
        (
            "a session and an application of anything",
            {"session": "*.>", "application": "\x00 ", "sampling": {"max_tokens": 5}},
        ),
    ],
)
async def test_an_odd_request_is_refused_or_served_to_its_end(
    fleet: Fleet, name: str, change: dict[str, Any]
) -> None:
    async with client_of(fleet) as (bus, _client, _):
        raw = await connect_raw(fleet)
        request_id = "odd-" + name.replace(" ", "-")
        body = {"request_id": request_id, "prompt": "hello"} | change
        answer = msgspec.msgpack.decode(
            (
                await raw.request(
                    "slo.v1.requests.default.chat", msgspec.msgpack.encode(body), timeout=WAIT_S
                )
            ).data
        )
        assert answer["type"] in ("received", "refused")
        if answer["type"] == "received":
            async with asyncio.timeout(WAIT_S):
                while (
                    await replay_of(bus, GenerateRequest(request_id=request_id))
                ).verdict is None:
                    await raw.flush()
        await raw.close()


async def test_a_cancel_of_what_never_was_leaves_its_id_usable(fleet: Fleet) -> None:
    async with client_of(fleet) as (bus, client, wire):
        raw = await connect_raw(fleet)
        await raw.publish(subjects.cancel(request_key("default", "later")), b"{}", headers=JSON)
        await raw.flush()
        await raw.close()
        delivered = await ask(
            client,
            GenerateRequest(
                request_id="later", prompt="now", sampling=Sampling(max_tokens=5, ignore_eos=True)
            ),
        )
        await check(bus, wire, [delivered])


async def test_a_prompt_beyond_the_context_ends_as_invalid_also_when_no_worker_is_heard() -> None:
    """At the door, while a worker was heard once; else as soon as one is heard again."""
    hasty = {
        "SLACKLINE_ADMISSION_SWEEP_S": "0.2",
        "SLACKLINE_ADMISSION_LOST_S": "1.0",
        "SLACKLINE_ADMISSION_HOMELESS_S": "0.5",
    }
    spec = FleetSpec(replicas=1, gateway=False, drain_s=1.0, environment=hasty)
    too_long = "a" * 20_000
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, wire):
        heard = asyncio.Event()
        await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, lambda *_: heard.set())
        worker = fleet.process("worker-r1")
        sampling = Sampling(max_tokens=2000, ignore_eos=True)
        await client.submit(
            GenerateRequest(request_id="c-0", prompt="a", sampling=sampling), "chat"
        )
        async with asyncio.timeout(WAIT_S):
            await heard.wait()
            while not any(isinstance(e, Delta) for events in wire.events.values() for e in events):
                await asyncio.sleep(0.05)
            worker.send(signal.SIGSTOP)
            await wire.replaced.wait()
        with pytest.raises(PeerError, match=r"maximum context length is .* your prompt has 20000"):
            await client.submit(GenerateRequest(request_id="c-1", prompt=too_long), "chat")
        fleet.process("admission").kill()
        handle = await client.submit(GenerateRequest(request_id="c-2", prompt=too_long), "chat")
        worker.send(signal.SIGCONT)
        async with asyncio.timeout(WAIT_S):
            verdict = await handle.wait()
        assert verdict.finish_reason == FinishReason.INVALID
        assert "20000 tokens" in verdict.message
