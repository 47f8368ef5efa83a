"""Tests of the headers of a request to the gateway: SLO, tier, tenant, ids, and CORS origins."""

from pathlib import Path
from typing import Any

import pytest

from services.gateway.config import GatewayConfig
from services.gateway.http.slo_headers import SLO_HEADERS, read_slo
from shared.bus.nats import connect
from shared.rules.http_keys import line_of, new_key
from shared.vocabulary import Definition, Slo
from tests.services.gateway.site import Site, client_of, gateway, key_of, new_id, replies_in, sse
from tests.services.gateway.standin_fleet import standing_in

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_an_slo_in_headers_refines_that_of_the_tier() -> None:
    tier = Slo(ttft_x=3.0, tbt_s=0.1, definition=Definition.MEAN_TPOT)
    for headers, bounds in (
        ({"x-slo-tpot-ms": "50"}, {"ttft_x": 3.0, "tbt_s": 0.05}),
        ({"x-slo-ttft-ms": "700"}, {"ttft_s": 0.7, "tbt_s": 0.1}),
        ({"x-slo-ttlt-ms": "9000", "x-slo-tpot-ms": "None"}, {"ttft_x": 3.0, "ttlt_s": 9.0}),
        ({"x-slo-ttft-ms": "none", "x-slo-ttlt-ms": "none"}, {"tbt_s": 0.1}),
    ):
        assert read_slo(headers, tier) == Slo(**bounds, definition=Definition.MEAN_TPOT)
    assert read_slo({}, tier) is None


NOT_HEADERS = [
    ("x-llm-d-slo-tbt-ms", "x-llm-d-slo-tpot-ms"),
    ("x-slo-ttft", "x-slo-ttft-ms"),
    ("x-slackline-teir", "x-slackline-tier"),
    (f"x-slackline-{1000 * 'x'}", "x-slackline-lenient"),
]


async def test_a_mistyped_header_of_ours_is_refused_and_those_there_are_are_named(at: Site) -> None:
    for name, meant in NOT_HEADERS:
        for path in ("completions", "chat/completions", "responses"):
            answer = await at.post(path, {"prompt": "hi"}, **{name: "30"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name[:64]), path
            assert len(answer.content) < 1000
        known = error["message"].partition("the nearest first: ")[2].split(", ")
        assert meant in known[:3], error
        assert {"x-slackline-allow-relegation", "x-slo-ttlt-ms"} < set(known)
    assert at.fleet.asked == {}
    others = {"x-slow": "1", "x-slackline": "1", "x-llm-d-inference-pool": "1"}
    assert (await at.post("completions", {"prompt": "hi"}, **others)).status_code == 200


OUT_OF_BOUNDS = [
    ("0.001", "must be at least 0.1 ms"),
    ("-inf", "must be at least 0.1 ms"),
    ("inf", "must be at most 31536000000 ms, a year"),
    ("nan", "must be a number of milliseconds, or `none`"),
    ("soon", "must be a number of milliseconds, or `none`"),
]


async def test_a_bound_that_no_slo_can_have_is_refused_by_the_name_of_its_header(at: Site) -> None:
    for name in (name for names in SLO_HEADERS.values() for name in names):
        for value, said in OUT_OF_BOUNDS:
            answer = await at.post("completions", {"prompt": "a"}, **{name: value})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, name)
            assert error["message"] == f"{name} {said}"
    assert at.fleet.asked == {}


TPOT, THINKING = "x-llm-d-slo-tpot-ms", "x-slackline-slo-thinking-tpot-ms"
FAULTS: list[tuple[str, dict[str, str], str]] = [
    ("slo.ttft_s", {"x-slo-ttft-ms": "9", "x-llm-d-slo-ttft-ms": "1"}, "x-llm-d-slo-ttft-ms"),
    ("slo.tbt_s", {TPOT: "1", THINKING: "2"}, TPOT),
    ("slo.tbt_s", {TPOT: "2", THINKING: "1"}, THINKING),
    ("slo.tbt_s", {THINKING: "1"}, THINKING),
    ("slo.tbt_s", {TPOT: "none", THINKING: "1"}, THINKING),
    ("slo.ttft_s", {TPOT: "1"}, "slo.ttft_s"),  # the tier's
    ("prompt", {TPOT: "1"}, "prompt"),
]


@pytest.mark.parametrize(("param", "headers", "named"), FAULTS)
async def test_an_slo_that_admission_refuses_is_called_by_the_header_that_gave_it(
    at: Site, param: str, headers: dict[str, str], named: str
) -> None:
    body = {"prompt": f"refuse unattainable_slo {param}"}
    answer = await at.post("completions", body, **headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unattainable_slo")
    assert error["param"] == named


async def test_headers_become_tenant_slo_importance_and_trace(at: Site) -> None:
    key = new_id()
    headers = {
        "x-llm-d-inference-fairness-id": "acme",
        "x-llm-d-slo-ttft-ms": "250",
        "x-slo-ttft-ms": "999",
        "x-slo-tpot-ms": "30.5",
        "x-slackline-slo-ttlt-ms": "60000",
        "x-slackline-slo-thinking-tpot-ms": "20",
        "x-slackline-application": "editor",
        "x-slackline-allow-relegation": "false",
        "traceparent": PARENT,
    }
    body = {"prompt": "hi", "max_tokens": 2, "user": "u1", "priority": 2}
    sampling = {"temperature": 0.5, "top_p": 0.9, "seed": 7, "stop": "END"}
    answer = await at.post("completions", body | sampling, key, **headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] == key
    assert answer.json()["id"] == f"cmpl-{key}"
    assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 1}
    request = at.request(key, "acme")
    assert request.slo == Slo(ttft_s=0.25, tbt_s=0.0305, ttlt_s=60.0, thinking_tbt_s=0.02)
    assert (request.application, request.session) == ("editor", "u1")
    assert (request.allow_relegation, request.importance) == (False, 3.0)
    drawn = request.sampling
    assert (drawn.max_tokens, drawn.temperature, drawn.top_p) == (2, 0.5, 0.9)
    assert (drawn.seed, drawn.stop) == (7, ["END"])
    assert at.fleet.traceparents[key_of(key, "acme")] == PARENT


OBJECTIVE, OWN = "x-llm-d-inference-objective", "x-slackline-tier"


VERDICTS = {"x-slackline-verdict": "true"}


async def test_an_answer_tells_the_verdict_on_each_choice_if_asked(at: Site) -> None:
    asked = {"prompt": ["relegate", "hi"], "max_tokens": 2}
    answer = (await at.post("completions", asked, **VERDICTS)).json()
    late, kept = answer["verdicts"]
    assert (late["slo_met"], late["relegated"]) == (False, True)
    assert (kept["slo_met"], kept["relegated"], kept["missed"]) == (True, False, "")
    assert answer["service_tier"] == "flex", "one choice was relegated"
    assert "replica" not in kept
    assert "verdicts" not in (await at.post("completions", asked)).json()
    streamed = {"prompt": "relegate", "max_tokens": 2, "n": 2, "stream": True}
    *chunks, last = replies_in(await at.post("completions", streamed, **VERDICTS))
    assert not any("verdicts" in chunk for chunk in chunks)
    assert last["choices"][0]["finish_reason"] == "length"
    assert [one["slo_met"] for one in last["verdicts"]] == [False, False]
    streamed["stream_options"] = {"include_usage": True}
    last = replies_in(await at.post("completions", streamed, **VERDICTS))[-1]
    assert len(last["verdicts"]) == 2, "beside the usage"
    item = {"role": "user", "content": "relegate"}
    for stream in (False, True):
        answer = await at.post("responses", {"input": [item], "stream": stream}, **VERDICTS)
        reply = sse(answer.text)[-1]["response"] if stream else answer.json()
        assert [one["relegated"] for one in reply["verdicts"]] == [True]


async def test_a_key_names_a_request_and_a_correlation_id_only_comes_back(at: Site) -> None:
    key, prompt = f"order 7/{new_id()}", {"prompt": "one", "return_token_ids": True}
    answers = [
        await at.post("completions", prompt, key, x_request_id=f"trace.{n}") for n in range(2)
    ]
    assert [a.headers["x-request-id"] for a in answers] == ["trace.0", "trace.1"]
    first, again = [answer.json() for answer in answers]
    assert first["id"] == again["id"], "attached by its key"
    assert first["choices"] == again["choices"]
    assert again["choices"][0]["token_ids"] == list(range(16))
    one = await at.post("completions", prompt, x_request_id="the same")
    two = await at.post("completions", {"prompt": "two"}, x_request_id="the same")
    assert (one.status_code, two.status_code) == (200, 200)
    assert one.json()["id"] != two.json()["id"]
    for unfit in ("x" * 1000, "\x7f"):
        odd = await at.post("completions", prompt, x_request_id=unfit)
        assert odd.headers["x-request-id"] in odd.json()["id"], "its own id instead"


LENIENT, IGNORED = {"x-slackline-lenient": "true"}, "x-slackline-ignored"
STRICT = {"x-slackline-lenient": "false"}


async def test_a_lenient_request_has_its_unknown_fields_ignored_and_named(at: Site) -> None:
    body = {"prompt": "hi", "max_tokens": 1, "temprature": 1, "x\r\ny": {"deep": [1]}}
    assert (await at.post("completions", body, **STRICT)).status_code == 400
    answer = await at.post("completions", body, **LENIENT)
    assert answer.status_code == 200
    assert answer.headers[IGNORED] == "temprature, x\\r\\ny"
    marked = b'\xef\xbb\xbf{"prompt": "hi"}'
    cut_off = b'{"prompt": "hi", "temprature": 1, "n'
    for content, status in ((b"[1]", 400), (b"{", 400), (cut_off, 400), (marked, 200)):
        other = await at.post("completions", content, **LENIENT)
        assert other.status_code == status
        assert IGNORED not in other.headers
    many = {"prompt": "hi"} | {f"field{n}": n for n in range(5000)}
    answer = await at.post("completions", many, **LENIENT)
    assert answer.status_code == 200
    assert 500 < len(answer.headers[IGNORED]) <= 512


async def test_a_lenient_request_may_have_unknown_fields_at_any_depth(at: Site) -> None:
    tool = {"type": "function", "strict": True, "function": {"name": "f", "cached": {"a": 1}}}
    body = {
        "messages": [{"role": "user", "content": "hi", "own": 1}],
        "max_tokens": 1,
        "tools": [tool, {"type": "function", "strict": True, "function": {"name": "g"}}],
        "tool_choice": {"type": "function", "function": {"name": "f", "more": 1}},
        "stream_options": {"include_usage": True, "extra": 1},
    }
    strict = await at.post("chat/completions", body, **STRICT)
    assert strict.status_code == 400
    assert "x-slackline-lenient: true" in strict.json()["error"]["message"]
    answer = await at.post("chat/completions", body, **LENIENT)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == (
        "tools.strict, tools.function.cached, tool_choice.function.more, stream_options.extra"
    )


async def test_what_a_coding_agent_asks_of_others_alone_is_ignored_and_named(at: Site) -> None:
    function = {"type": "function", "name": "shell", "strict": False, "parameters": {}}
    content = [{"type": "input_text", "text": "ls"}]
    body = {
        "input": [{"type": "message", "role": "user", "content": content}],
        "tools": [function, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "text": {"verbosity": "low"},
        "max_output_tokens": 2,
    }
    answer = await at.post("responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == (
        "tools.web_search, tools.custom, include.web_search_call.action.sources, "
        "reasoning.summary, text.verbosity"
    )
    assert [tool["name"] for tool in answer.json()["tools"]] == ["shell"]
    plain = await at.post("responses", {"input": "hi", "max_output_tokens": 1})
    assert IGNORED not in plain.headers


async def test_scripts_of_the_origins_that_are_named_may_ask(nats_url: str, tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "keys"
    file.write_text(line_of("acme", key))
    ours, other = "https://chat.example.com", "https://evil.example.com"
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    body: dict[str, Any] = {"prompt": "hi", "max_tokens": 1, "stream": True}
    allowed = "access-control-allow-origin"
    async with (
        gateway(nats_url, cors_origins=[ours], keys=str(file)) as (url, _, _),
        connect(nats_url, "stand-in") as bus,
        standing_in(bus),
        client_of(url) as http,
    ):
        path, origin = "/v1/completions", {"origin": ours}
        preflight = await http.options(path, headers={**origin, **asks})
        assert (preflight.status_code, preflight.headers[allowed]) == (200, ours)
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = await http.options(path, headers={**asks, "origin": other})
        assert refused.status_code == 400
        assert allowed not in refused.headers
        with_key = {**origin, "authorization": f"Bearer {key}"}
        answer = await http.post(path, json=body, headers=with_key)
        assert (answer.status_code, answer.headers[allowed]) == (200, ours)
        without = await http.post(path, json=body, headers=origin)
        assert (without.status_code, without.headers[allowed]) == (401, ours)
        assert allowed not in (await http.get("/metrics", headers=origin)).headers
        assert allowed not in (await http.get("/v1/models", headers={"origin": other})).headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/", ""])
def test_an_origin_that_no_browser_sends_stops_the_start(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        GatewayConfig(cors_origins=[origin])
