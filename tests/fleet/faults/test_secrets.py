"""Tests of the logs and spans of a real fleet: even at the level debug they have no key and nothing
that a client said. A marker goes in at every place that a client can fill, and must not come out.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import openai

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.rules import http_keys
from tests.fleet.live import WAIT_S, connect_raw

MARKER = "zq7Marker"
SAID = f"my secret is {MARKER}"
# bodies of POST /v1/completions that are refused or fail, each at another place
BAD: list[Any] = [
    {"prompt": SAID, MARKER: 1},
    {"prompt": {"text": SAID}},
    {"prompt": SAID, "temperature": MARKER},
    {"prompt": SAID, "response_format": {"type": MARKER}},
    {"prompt": SAID, "structured_outputs": {"regex": f"({MARKER}"}},
    {"prompt": SAID, "response_format": {"type": "json_schema", "json_schema": {"schema": MARKER}}},
    {"prompt": SAID, "model": MARKER},
    {"prompt": SAID, "service_tier": MARKER},
    {"prompt": SAID, "logit_bias": {MARKER: 1}},
    {"prompt": SAID, "stop": 17 * [MARKER]},
    {"prompt": 600 * SAID},  # beyond the context
    MARKER,
]
MESSAGES: list[Any] = [
    [{"role": MARKER, "content": SAID}],
    [{"role": "user", "content": {"odd": SAID}}],
    [{"role": "user", "content": [{"type": MARKER, "text": SAID}]}],
    [{"role": "user", MARKER: SAID}],
]


async def speak(fleet: Fleet, key: str) -> None:
    """Say the marker over HTTP."""
    async with (
        openai.AsyncOpenAI(
            base_url=f"{fleet.http_url}/v1", api_key=key, max_retries=0, timeout=WAIT_S
        ) as client,
        httpx.AsyncClient(base_url=fleet.http_url, timeout=WAIT_S, trust_env=False) as http,
    ):
        model = (await client.models.list()).data[0].id
        talk: list[Any] = [{"role": "system", "content": SAID}, {"role": "user", "content": SAID}]
        answer = await client.chat.completions.create(
            model=model, messages=talk, max_tokens=8, n=2, stop=[MARKER]
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        stream = await client.completions.create(
            model=model, prompt=SAID, max_tokens=2000, stream=True
        )
        await anext(aiter(stream))
        await stream.close()  # hung up
        auth = {"authorization": f"Bearer {key}"}
        for body in BAD:
            strict = {**auth, "x-slackline-lenient": "false"}
            answered = await http.post("/v1/completions", json=body, headers=strict)
            assert 400 <= answered.status_code < 500, body
            await http.post(
                "/v1/completions", json=body, headers=auth
            )  # which names what it ignores
        for messages in MESSAGES:
            answered = await http.post(
                "/v1/chat/completions", json={"messages": messages}, headers=auth
            )
            assert 400 <= answered.status_code < 500, messages
        odd = await http.post("/v1/completions", content=f'{{"{MARKER}', headers=auth)
        assert odd.status_code == 400
        for headers in (
            {"authorization": f"Bearer {MARKER}"},
            {"authorization": f"Basic {MARKER}"},
            {**auth, "x-llm-d-inference-fairness-id": MARKER},
            {**auth, "x-slo-ttft-ms": MARKER},
            {**auth, "x-slackline-tier": MARKER},
            {**auth, "idempotency-key": f"a {MARKER}"},
            {**auth, "traceparent": MARKER},
        ):
            await http.post(
                "/v1/completions", json={"prompt": SAID, "max_tokens": 2}, headers=headers
            )
        await http.get(f"/v1/models/{MARKER}", headers=auth)
        await http.get(f"/{MARKER}?q={MARKER}")


async def speak_on_nats(fleet: Fleet) -> None:
    """Say the marker over NATS, in requests that can be read and in some that cannot."""
    client = await connect_raw(fleet)
    for request in (
        {"request_id": "a", "prompt": SAID},
        {"request_id": "b", "prompt": SAID, MARKER: 1},
        {"request_id": "c", "prompt": SAID, "sampling": {"temperature": MARKER}},
        {"request_id": "d", "prompt": SAID, "sampling": {"structured": {"type": MARKER}}},
        {"request_id": "e", "prompt": SAID, "inbox": MARKER},
        {"request_id": "f", "prompt": SAID, "slo": {"definition": MARKER}},
        {"request_id": f"{MARKER} {MARKER}", "prompt": SAID},
        {"request_id": "g", "messages": [{"role": MARKER, MARKER: SAID}]},
        {"request_id": "h", "token_ids": [MARKER]},
        {"request_id": "i", "tenant": MARKER, "prompt": SAID},
    ):
        for subject in (subjects.requests("default", "chat"), subjects.attach("default")):
            answer = await client.request(
                subject,
                json.dumps(request).encode(),
                headers={"Content-Type": "application/json"},
                timeout=WAIT_S,
            )
            assert json.loads(answer.data)["type"] in ("received", "refused", "replay")
    await client.publish("slo.v1.cancel.default.a", json.dumps({"reason": SAID}).encode())
    await client.drain()


async def test_no_log_and_no_span_has_what_a_client_said_or_its_key(tmp_path: Path) -> None:
    key = http_keys.new_key()
    (tmp_path / "keys").write_text(http_keys.line_of("acme", key))
    spans = tmp_path / "spans.jsonl"
    spec = FleetSpec(
        replicas=1,
        pace=0.2,
        store=tmp_path / "fleet",
        drain_s=2.0,
        environment={
            "SLACKLINE_LOG_LEVEL": "debug",
            "SLACKLINE_TRACE_FILE": str(spans),
            "SLACKLINE_GATEWAY_KEYS": str(tmp_path / "keys"),
        },
    )
    async with Fleet(spec) as fleet:
        await speak(fleet, key)
        await speak_on_nats(fleet)
        assert [c.name for c in fleet.processes if c.starts != 1] == []
        logs = fleet.folder / "logs"
    told = {path: path.read_text() for path in (*logs.iterdir(), spans)}
    assert any("request.served" in text for text in told.values())
    assert told[spans].count("\n") > 10
    found = [
        (path.name, line)
        for path, text in told.items()
        for line in text.splitlines()
        if MARKER in line or key in line or key.removeprefix("sk-")[:16] in line
    ]
    assert found == []
