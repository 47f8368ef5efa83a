"""Tests of the senders of `slackline load`, over simulated NATS and over real HTTP: what they send,
and what they note of the answers.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.open_loop import run_load
from loadgen.load.send_http import HttpSender, events
from loadgen.load.send_nats import NatsSender, cap_tokens
from loadgen.load.tally import Outcome, Tally
from loadgen.load.texts.prompts import prompt_ids
from loadgen.load.workload import named_workload
from shared import subjects
from shared.bus.api import Bus, Call, Endpoint
from shared.client.client import Client
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.rules.tiers import DEMO_3
from shared.schemas import Cancel, Delta, End, GenerateRequest, Received, Refused, Status
from shared.vocabulary import FinishReason, ServiceClass
from tests.made import verdict
from tests.simulated.bus import SimNet
from tests.simulated.process import VirtualClock, virtual_loop
from tests.simulated.virtual_loop import run_virtual


class PacedServer:
    """A token every `tbt_s`, the first after `ttft_s`; refuses whatever has the tier `batch`;
    relegates `summary`.
    """

    def __init__(self, bus: Bus, ttft_s: float, tbt_s: float, refusal: str) -> None:
        self.bus, self.ttft_s, self.tbt_s, self.refusal = bus, ttft_s, tbt_s, refusal
        self.requests: list[GenerateRequest] = []
        self.cancelled: set[str] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.bus.serve(
            "admission",
            [Endpoint("requests", subjects.REQUESTS, GenerateRequest, self.on_request, "q")],
            {},
        )
        await self.bus.subscribe(
            subjects.CANCELS, Cancel, lambda cancel, call: self.cancelled.add(call.subject)
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def on_request(self, request: GenerateRequest, call: Call) -> None:
        self.requests.append(request)
        tier = call.subject.rpartition(".")[2]
        self.spawn(self.answer(request, tier, call))

    async def answer(self, request: GenerateRequest, tier: str, call: Call) -> None:
        if tier == "batch":
            await call.reply(Refused(code=self.refusal, message="full"))
            return
        inbox, tokens = request.inbox, request.sampling.output_tokens
        assert inbox is not None
        assert tokens is not None
        await call.reply(
            Received(
                request_id=request.request_id,
                stream_subject=inbox,
                arrived_unix_s=0.0,
                prompt_tokens=1,
            )
        )
        service_class = ServiceClass.BEST_EFFORT if tier == "summary" else ServiceClass.STANDARD
        await self.bus.publish(
            inbox, Status(state="accepted", service_class=service_class, attempt=1)
        )
        await asyncio.sleep(self.ttft_s)
        for i in range(tokens):
            if i:
                await asyncio.sleep(self.tbt_s)
            last = FinishReason.STOP if i == tokens - 1 else None
            await self.bus.publish(
                inbox,
                Delta(
                    attempt=1, offset=i, tokens=[65], text="A", text_offset=i, finish_reason=last
                ),
            )
        ended = verdict(output_tokens=tokens, service_class=service_class)
        await self.bus.publish(inbox, End(verdict=ended))


def over_nats(
    plan: list[PlannedRequest],
    ttft_s: float,
    tbt_s: float,
    stop_after_s: float | None = None,
    refusal: str = "slow_down",
) -> tuple[Tally, PacedServer]:
    async def body() -> tuple[Tally, PacedServer]:
        net, clock = SimNet(random.Random(0)), VirtualClock(virtual_loop())
        tally, stop = Tally(DEMO_3), asyncio.Event()
        server = PacedServer(net.connect("server"), ttft_s, tbt_s, refusal)
        await server.start()
        async with Client(net.connect("load"), clock) as client:
            if stop_after_s is not None:
                asyncio.get_running_loop().call_later(stop_after_s, stop.set)
            sender = NatsSender(client, clock, seed=1, longest_output=700, context_tokens=8192)
            await run_load(plan, sender, tally, clock, stop, wait_s=60.0)
            await asyncio.sleep(0.1)
        for task in tuple(server.tasks):
            task.cancel()
        return tally, server

    return run_virtual(body())


def one(number: int, tier: str, prompt: int = 50, output: int = 10) -> PlannedRequest:
    return PlannedRequest(number, 0.1 * number, prompt, output, tier, 2.0, "acme", "code")


def test_the_plan_is_sent_and_does_not_reveal_the_output_length() -> None:
    plan = plan_requests([i / 20 for i in range(100)], named_workload("mix", 8192), DEMO_3, 1)
    tally, server = over_nats(plan, 0.01, 0.001)
    assert len(tally.outcomes) == len(server.requests) == 100
    for outcome in tally.outcomes:
        planned = outcome.planned
        request = next(r for r in server.requests if r.request_id.endswith(f"-{planned.number}"))
        assert request.token_ids is not None
        assert len(request.token_ids) == planned.prompt_tokens
        assert all(32 <= token <= 126 for token in request.token_ids)
        assert request.sampling.output_tokens == planned.output_tokens
        assert request.sampling.max_tokens == min(1024, 8192 - planned.prompt_tokens)
        assert request.slo == DEMO_3.tiers[planned.tier].slo
    assert len({request.request_id for request in server.requests}) == 100


def test_times_are_measured_at_the_client_and_refusals_and_relegations_are_noted() -> None:
    tally, _ = over_nats(
        [one(0, "interactive"), one(1, "summary"), one(2, "batch")], ttft_s=0.5, tbt_s=0.05
    )
    first, second, third = tally.outcomes
    assert first.ttft_s == pytest.approx(0.5, abs=0.01)
    assert first.ttlt_s == pytest.approx(0.95, abs=0.02)
    assert list(tally.gaps_s["interactive"]) == pytest.approx([0.05] * 9, abs=0.005)
    assert first.met
    assert first.server_met
    assert not first.relegated
    assert second.relegated
    assert third.ended == FinishReason.REFUSED
    assert third.message == "slow_down: full"


def test_a_pace_slower_than_promised_is_missed_at_the_client_whatever_the_server_says() -> None:
    outcome = over_nats([one(0, "interactive", output=60)], ttft_s=1.9, tbt_s=0.08)[0].outcomes[0]
    assert outcome.server_met
    assert not outcome.met


def test_stopping_cancels_running_requests() -> None:
    tally, server = over_nats(
        [one(i, "interactive", output=700) for i in range(5)],
        ttft_s=0.1,
        tbt_s=0.05,
        stop_after_s=1.0,
    )
    assert [outcome.ended for outcome in tally.outcomes] == ["unfinished"] * 5
    assert len(server.cancelled) == 5


def test_prompts_repeat_for_a_seed_and_caps_stay_within_the_context() -> None:
    assert prompt_ids(1, 2, 300) == prompt_ids(1, 2, 300) != prompt_ids(1, 3, 300)
    assert cap_tokens(700, 8192, 100) == 1024
    assert cap_tokens(700, 8192, 8000) == 192


# ---------------------------------------------------------------- HTTP


@asynccontextmanager
async def http_server(
    answer: bytes, status: str = "200 OK"
) -> AsyncIterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Gives `answer` to every request, and keeps what was asked: (head, body)."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(
            (
                int(line.split(":")[1])
                for line in head.splitlines()
                if line.startswith("content-length")
            ),
            0,
        )
        asked.append((head, json.loads(await reader.readexactly(length) or b"{}")))
        writer.write(
            f"HTTP/1.1 {status}\r\nconnection: close\r\n"
            f"content-length: {len(answer)}\r\n\r\n".encode()
            + answer
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", asked


async def over_http(url: str, planned: PlannedRequest) -> Outcome:
    clock, tally = Clock(), Tally(DEMO_3)
    sender = HttpSender(url, None, DEMO_3, clock, seed=1)
    try:
        outcome = tally.begin(planned, clock.unix_s(), 0.0)
        await sender.send(outcome)
    finally:
        await sender.close()
    return outcome


def chunk(
    text: str, finish_reason: str | None = None, service_tier: str = "priority", **choice: Any
) -> bytes:
    body = {
        "choices": [{"text": text, "finish_reason": finish_reason, **choice}],
        "service_tier": service_tier,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


async def test_over_http_the_tier_has_its_name_and_bounds_and_tokens_are_counted_by_ids() -> None:
    stream = (
        chunk("ab", token_ids=[1, 2])
        + b": waiting\n\n"
        + chunk("c", token_ids=[3])
        + chunk("", "length", token_ids=[])
        + b"data: [DONE]\n\n"
    )
    async with http_server(stream) as (url, asked):
        outcome = await over_http(url, one(0, "interactive", prompt=7, output=3))
    assert outcome.finished
    assert outcome.met
    assert outcome.measure.tokens == 3
    head, body = asked[0]
    assert head.startswith("post /v1/completions ")
    assert "x-slackline-tier: interactive" in head
    assert "x-llm-d-slo-ttft-ms: 2000" in head
    assert "x-llm-d-slo-tpot-ms: 60" in head
    assert "x-llm-d-inference-fairness-id: acme" in head
    assert len(body["prompt"]) == 7
    keys = ("max_tokens", "service_tier", "priority", "stream")
    assert [body[key] for key in keys] == [3, "priority", 1, True]


@pytest.mark.parametrize("more", ["/", "/v1", "/v1/"])
async def test_over_http_the_url_may_be_the_base_url_of_openais_clients(more: str) -> None:
    async with http_server(chunk("", "length") + b"data: [DONE]\n\n") as (url, asked):
        await over_http(url + more, one(0, "interactive"))
    head, _ = asked[0]
    assert head.startswith("post /v1/completions ")


@pytest.mark.parametrize(
    ("code", "advice"),
    [("unknown_tier", "--tiers says"), ("invalid_api_key", "SLACKLINE_API_KEY is")],
)
async def test_a_mistake_of_the_load_ends_it_at_the_first_answer(code: str, advice: str) -> None:
    refusal = {"error": {"code": code, "message": "it is not known"}}
    plan = [one(number, "interactive") for number in range(50)]
    async with http_server(json.dumps(refusal).encode(), "400 Bad Request") as (url, asked):
        clock = Clock()
        sender = HttpSender(url, None, DEMO_3, clock, seed=1)
        with pytest.raises(PeerError, match=f"^it is not known; {advice}"):
            await run_load(plan, sender, Tally(DEMO_3), clock, asyncio.Event(), 60.0)
        await sender.close()
    assert len(asked) < len(plan)


def test_over_nats_a_tier_that_the_fleet_does_not_know_ends_the_load() -> None:
    plan = [one(number, "batch") for number in range(50)]
    with pytest.raises(PeerError, match=r"^full; --tiers says which tiers the load has"):
        over_nats(plan, 0.01, 0.001, refusal="unknown_tier")


async def test_over_http_a_key_says_whose_the_requests_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKLINE_API_KEY", "sk-abc")
    async with http_server(chunk("", "length") + b"data: [DONE]\n\n") as (url, asked):
        await over_http(url, one(0, "interactive"))
    head, _ = asked[0]
    assert "authorization: bearer sk-abc\r\n" in head
    assert "x-llm-d-inference-fairness-id" not in head


async def test_over_http_flex_means_relegated_and_without_ids_pieces_of_text_count() -> None:
    async with http_server(
        chunk("a", service_tier="flex") + chunk("b", "stop", service_tier="flex")
    ) as (url, _):
        outcome = await over_http(url, one(0, "interactive"))
    assert outcome.relegated
    assert outcome.measure.tokens == 2


@pytest.mark.parametrize(
    ("status", "answer", "ended"),
    [
        (
            "429 Too Many Requests",
            b'{"error":{"code":"slow_down","message":"full"}}',
            FinishReason.REFUSED,
        ),
        ("400 Bad Request", b'{"error":{"code":"invalid_value","message":"no"}}', "error"),
        ("502 Bad Gateway", b"<html>", "error"),
        ("200 OK", chunk("a", token_ids=[1]), "error"),
        ("200 OK", b"data: {nonsense\n\n", "error"),
        ("200 OK", b"data: 5\n\n", "error"),
        ("200 OK", b'data: {"error": "out of memory"}\n\n', "error"),
        ("200 OK", b'data: {"object": "error", "message": "boom", "code": 400}\n\n', "error"),
        ("200 OK", b'data: {"choices": [5]}\n\n', "error"),
        ("200 OK", b'data: {"choices": [{"text": "\xff"}]}\n\n', "error"),
    ],
)
async def test_over_http_each_kind_of_failure_is_distinguished(
    status: str, answer: bytes, ended: str
) -> None:
    async with http_server(answer, status) as (url, _):
        outcome = await over_http(url, one(0, "interactive"))
    assert outcome.ended == ended
    assert outcome.message


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (chunk("", {"type": "length"}), FinishReason.FAILED),  # type: ignore[arg-type]
        (b'data: {"choices": null}\n\n' + chunk("", "length"), FinishReason.LENGTH),
        # separators of lines that are none here, and other line ends
        (
            b'data:{"choices": [{"text": "a\xe2\x80\xa8b\xc2\x85"}]}\r\n\r\n' + chunk("", "stop"),
            FinishReason.STOP,
        ),
        # an event of two lines
        (
            b'data: {"choices": [{"text": "a",\ndata: "finish_reason": "stop"}]}\n\n',
            FinishReason.STOP,
        ),
    ],
)
async def test_over_http_the_odd_forms_of_other_servers_are_read(answer: bytes, ended: str) -> None:
    async with http_server(answer) as (url, _):
        outcome = await over_http(url, one(0, "interactive"))
    assert outcome.ended == ended


async def test_with_nothing_at_the_address_the_check_says_what_to_do() -> None:
    sender = HttpSender("http://127.0.0.1:1", None, DEMO_3, Clock(), seed=1)
    with pytest.raises(BusError, match="slackline up"):
        await sender.check()
    await sender.close()


async def test_a_line_of_a_stream_ends_with_a_line_feed_alone() -> None:
    async def parts() -> AsyncIterator[bytes]:
        whole = 'data: {"text":"a\u2028b\u0085c"}\r\n\r\ndata: [DONE]'.encode()
        for at in range(len(whole)):  # cut within characters, too
            yield whole[at : at + 1]

    found = [data.decode() async for data in events(parts())]
    assert found == ['{"text":"a\u2028b\u0085c"}', "[DONE]"]
