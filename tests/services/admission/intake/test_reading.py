"""Tests of how admission reads requests: it refuses bad ones before they cost anything."""

import asyncio
import subprocess
import sys
import threading
from random import Random
from typing import Any

import msgspec
import pytest
import tokenizers
from msgspec.structs import replace

from loadgen.access import Access
from loadgen.cli.sending.chat import Chat
from loadgen.fleet.nats_server import MAX_PAYLOAD_BYTES
from services.admission.intake import idempotency as digests
from services.admission.intake import reading as intake
from services.admission.tokenizers import Tokenizers
from services.admission.workers import Workers
from services.worker.core.snapshot_pages import pages
from shared.clock import Clock
from shared.errors import PeerError
from shared.measure import Measure
from shared.perf import profile_file as profiles
from shared.perf.zero_load import CHUNK_TOKENS, tbt_s, ttft_s
from shared.rules.rules import Rules
from shared.rules.tiers import DEFAULT
from shared.schemas import (
    Announce,
    AttemptOver,
    GenerateRequest,
    Likelihood,
    Resume,
    Sampling,
    Thinking,
    TokenLogprob,
)
from shared.structured import JsonObject
from shared.telemetry.instruments import Registry
from shared.text import chat_prompt
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import FinishReason, ReplicaId, RequestKey, ServiceClass, Slo
from tests import made
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import virtual


def worker(engine: str) -> Announce:
    """A worker's announcement, which names its engine."""
    return made.announce(engine=engine, profile="p", kv_blocks=100000, context_tokens=1000000)


def asked(logprobs: int | None, max_tokens: int = 1000) -> GenerateRequest:
    return GenerateRequest(
        request_id="a", prompt="x", sampling=Sampling(max_tokens=max_tokens, logprobs=logprobs)
    )


@pytest.mark.parametrize(
    ("engine", "ours", "speaks"),
    [("torch", "m", True), ("torch", "", False), ("torch", "n", False), ("sim", "", True)],
)
async def test_a_text_needs_its_models_tokenizer_and_token_ids_need_none(
    engine: str, ours: str, speaks: bool
) -> None:
    known = Tokenizers({ours: Tokenizer.builtin()} if ours else {})
    assert await known.of("", None) is Tokenizer.builtin()
    there = replace(worker(engine), vocabulary=9)
    tokenizer = await known.of("m", there)
    assert (tokenizer is not None) == speaks
    if speaks:
        return
    with pytest.raises(PeerError, match="SLACKLINE_ADMISSION_MODELS") as refused:
        intake.tokenise(asked(None), tokenizer, there)
    assert refused.value.code == "server_error"
    ids = replace(asked(None), prompt=None, token_ids=[1, 8])
    assert intake.tokenise(ids, tokenizer, there) == [1, 8]
    with pytest.raises(PeerError, match="between 0 and 8"):
        intake.tokenise(replace(ids, token_ids=[9]), tokenizer, there)


def test_log_probabilities_that_no_message_can_carry_are_refused() -> None:
    with pytest.raises(PeerError) as refused:
        intake.fits([1], asked(20, 100_000), worker("torch"))
    assert refused.value.param == "logprobs"
    assert intake.fits([1], asked(None), worker("torch")) == 1000


def test_a_snapshot_of_heavy_attempts_comes_in_pages_that_a_message_can_carry() -> None:
    likely = TokenLogprob(
        Likelihood(7, b"word", -1.5), [Likelihood(n, b"word", -1.5) for n in range(20)]
    )
    overs = [
        AttemptOver(
            key=RequestKey(f"t.{n}"), attempt=1, replica=ReplicaId("r1"), incarnation="i",
            why=FinishReason.STOP, relegated=False,
            service_class=ServiceClass.STANDARD,
            resume=Resume(
                tokens=bytes(4 * 500), measure=Measure(tokens=500), logprobs=[likely] * 500
            ),
        )
        for n in range(60)
    ]  # fmt: skip
    found = pages("i", [], overs)
    assert [over.key for page in found for over in page.overs] == [over.key for over in overs]
    assert max(len(msgspec.msgpack.encode(page)) for page in found) < MAX_PAYLOAD_BYTES
    assert len(found) > 1
    assert len(pages("i", [], [])) == 1


def test_an_answer_asked_for_again_in_vain_is_not_forgotten() -> None:
    chat = Chat(Access("nats://127.0.0.1:1"), "chat", "", Sampling())
    chat.turns.append(("question", "answer"))
    assert not chat.again()
    assert chat.turns == [("question", "answer")]


def test_a_text_too_long_for_the_context_is_refused_before_it_is_tokenised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = Tokenizer.builtin()
    small = replace(worker("sim"), context_tokens=1000)

    def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was tokenised")

    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "encode", never)
        messages = [{"role": "user", "content": "x" * 12_000}]
        for asking in (
            GenerateRequest(request_id="a", prompt="x" * 12_000, sampling=Sampling(max_tokens=1)),
            GenerateRequest(request_id="a", messages=messages, sampling=Sampling(max_tokens=1)),
        ):
            with pytest.raises(PeerError, match="at least 1") as refused:
                intake.tokenise(asking, tokenizer, small)
            assert refused.value.code == "context_length_exceeded"
    assert len(intake.tokenise(replace(asked(None), prompt="x" * 999), tokenizer, small)) == 999


QUESTION = "What is a river?"
WITH_TOOLS = Sampling(max_tokens=9, skip_special_tokens=False)
THINKS = [  # the end of the prompt; whether the marks are special; the sampling; the marks
    ("assistant\n", False, Sampling(max_tokens=9), Thinking(end="</think>", begun=False)),
    ("<think>\n", False, Sampling(max_tokens=9), Thinking(end="</think>", begun=True)),
    ("<think>\n\n</think>\n\n", False, Sampling(max_tokens=9), None),
    ("<think>\n", True, Sampling(max_tokens=9), None),  # its text shows no mark
    ("<think>\n", True, WITH_TOOLS, Thinking(end="</think>", begun=True)),
    ("<think>\n", False, Sampling(max_tokens=9, structured=JsonObject()), None),
]


@pytest.mark.parametrize(("end", "special", "sampling", "thinking"), THINKS)
def test_the_marks_of_thinking_are_those_of_the_template_and_the_text(
    end: str, special: bool, sampling: Sampling, thinking: Thinking | None
) -> None:
    inner = tokenizers.Tokenizer.from_str(Tokenizer.builtin().inner.to_str())
    marks = [tokenizers.AddedToken(n, special=special) for n in ("<think>", "</think>")]
    (inner.add_special_tokens if special else inner.add_tokens)(marks)
    tokenizer = Tokenizer(inner, eos_token_ids=frozenset(), render=chat_prompt.marked)
    prompt = tokenizer.encode(f"{QUESTION}<|im_start|>{end}", rendered=True)
    messages = [{"role": "user", "content": QUESTION}]
    asking = GenerateRequest(request_id="a", messages=messages, sampling=sampling)
    assert intake.thinking_of(asking, prompt, tokenizer) == thinking
    completion = replace(asking, messages=None, prompt=QUESTION)
    assert intake.thinking_of(completion, prompt, tokenizer) is None
    assert intake.thinking_of(asking, prompt, Tokenizer.builtin()) is None


@pytest.mark.parametrize(
    "large",
    [
        {"messages": [{"role": "user", "content": ""}] * 1000},
        {"chat_template_kwargs": {"x": "x" * 8000}},
        {"tools": [{"function": {"parameters": ["x"] * 3000}}]},
        {"messages": [{"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "x" * 8000}}]}]},
    ],
)  # fmt: skip
async def test_whatever_makes_a_message_large_it_is_read_beside_the_loop(
    large: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_in = list[int]()
    digest, tokenise = digests.digest, intake.tokenise

    def noted(step: Any) -> Any:
        def at_work(*given: Any) -> Any:
            read_in.append(threading.get_ident())
            return step(*given)

        return at_work

    monkeypatch.setattr(digests, "digest", noted(digest))
    monkeypatch.setattr(intake, "tokenise", noted(tokenise))
    small = {"messages": [{"role": "user", "content": "x"}]}
    request = GenerateRequest(request_id="a", tenant="t", **{**small, **large})
    workers = Workers(Clock(), 3.0, Registry())
    reader = intake.Intake(Rules(), Tokenizers(), workers, str, "admission")
    size = len(msgspec.msgpack.encode(request))
    key, made = await reader.look(request, next(iter(DEFAULT.tiers)), size)
    await reader.read(
        request, key, next(iter(DEFAULT.tiers)),
        payload_bytes=size, digest=made, arrived_unix_s=0.0, json=False, traceparent="", caller="",
    )  # fmt: skip
    assert len(read_in) == 2
    assert threading.get_ident() not in read_in


LONG_TEXTS = """
import asyncio, random, sys
from services.admission.intake.reading import Intake
from services.admission.tokenizers import Tokenizers
from services.admission.workers import Workers
from shared.clock import Clock
from shared.models import shipped
from shared.telemetry.instruments import Registry
from shared.rules.rules import Rules
from shared.schemas import GenerateRequest
from shared.text.tokenizer import Tokenizer

def held_mb():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmRSS")]
    return int(line.split()[1]) // 1024

async def main():
    tokenizer = Tokenizer.load(shipped.folder(shipped.DEFAULT))
    workers = Workers(Clock(), 3.0, Registry())
    door = Intake(Rules(), Tokenizers({"m": tokenizer}), workers, str, "admission")
    text = "".join(random.Random(1).choices("abcdefgh ijklmnop", k=2_000_000))
    request = GenerateRequest(request_id="r", prompt=text)
    before = held_mb()
    for _ in range(2):
        await door._in_time(request, len(text), lambda: len(tokenizer.encode(text)))
    print(held_mb() - before)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs glibc")
def test_the_memory_that_a_long_prompt_took_is_given_back() -> None:
    """Without that 300 MB stay, however long the process lives."""
    done = subprocess.run(
        [sys.executable, "-c", LONG_TEXTS], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 180


@virtual()
async def test_a_request_waits_for_unheard_workers_no_longer_than_they_may_take_to_be_heard() -> (
    None
):
    """Admission begins to listen anew again and again, as when its store cannot be reached."""
    clock = SimNet(Random(1)).clock
    workers = Workers(clock, 3.0, Registry())
    door = intake.Intake(Rules(), Tokenizers(), workers, str, "admission")

    async def disturb() -> None:
        while True:
            workers.forget()
            await asyncio.sleep(2.0)

    disturbing = asyncio.create_task(disturb())
    began = clock.unix_s()
    async with asyncio.timeout(60.0):
        with pytest.raises(PeerError, match="ask again") as refused:
            await door.read(
                replace(asked(None), model="unknown"), RequestKey("t.a"), "chat",
                payload_bytes=0, digest=b"", arrived_unix_s=began, json=False, traceparent="",
                caller="",
            )  # fmt: skip
    disturbing.cancel()
    assert refused.value.code == "server_is_overloaded"
    assert 3.0 < clock.unix_s() - began < 10.0


def test_an_slo_that_no_idle_replica_can_hold_is_refused_with_the_earliest_time() -> None:
    on = replace(worker("sim"), profile="a100-llama3-8b")
    one = tbt_s(profiles.load(on.profile), 1, 1)
    whole = ttft_s(profiles.load(on.profile), 8000, CHUNK_TOKENS)
    intake.check_attainable(Slo(ttft_s=2 * whole, tbt_s=2 * one), 8000, on)
    intake.check_attainable(Slo(ttlt_s=0.001), 8000, on)
    with pytest.raises(PeerError, match=r"earliest first token in .*; you asked for") as refused:
        intake.check_attainable(Slo(ttft_s=whole / 2, tbt_s=1.0), 8000, on)
    assert (refused.value.code, refused.value.param) == ("unattainable_slo", "slo.ttft_s")
    for engine in ("torch", "vllm"):  # it may have the prompt in its cache
        intake.check_attainable(Slo(ttft_s=whole / 2), 8000, replace(on, engine=engine))
    intake.check_attainable(Slo(ttft_s=whole / 2), 8000, replace(on, pace=0.1))
    for tight in (Slo(ttft_s=one / 2), Slo(tbt_s=one / 2)):
        with pytest.raises(PeerError):
            intake.check_attainable(tight, 1, on)
    intake.check_attainable(Slo(tbt_s=one / 2), 1, replace(on, draft=0.05))
    intake.check_attainable(Slo(ttft_s=1e-6), 8000, None)
