"""Tests of a fleet of real processes whose worker is vLLM, through the real OpenAI client."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
import pytest_asyncio

pytest.importorskip("vllm")

import openai

from loadgen.fleet.child import ChildError
from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.columns import unpack_list
from shared.schemas import GenerateRequest, PlanAck, Sampling
from shared.vocabulary import ReplicaId, Slo
from tests.fleet.documents import check_found
from tests.fleet.live import WAIT_S, ask, check, client_of, draw_requests, under_load, until_idle
from tests.services.worker.vllm.adapter import write_adapter
from tests.services.worker.vllm.conftest import DRAFT, OURS

pytestmark = pytest.mark.asyncio(loop_scope="module")
TALK: list[Any] = [{"role": "user", "content": "What is a river?"}]
SEED, BLOCK_TOKENS = 11, 32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """A fleet that drafts however slow the machine is, with so little KV that few long requests
    fill it.
    """
    adapter = write_adapter(tmp_path_factory.mktemp("adapter"), OURS, seed=3)
    drafts = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 3}
    spec = FleetSpec(
        replicas=1,
        policy="vllm",
        settings={"spec_tokens": "3"},
        engine="vllm",
        model=str(OURS),
        vllm={
            "speculative_config": drafts,
            "max_model_len": 2048,
            "max_lora_rank": 8,
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        },
        adapters={"other": str(adapter)},
        drain_s=2.0,
        environment={
            "SLACKLINE_WORKER_KV_BLOCKS": "160",
            "SLACKLINE_WORKER_MAX_SLOTS": "32",
            "SLACKLINE_WORKER_PROFILE_S": "3",
        },
    )
    async with Fleet(spec) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="module")
async def client(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client


async def test_the_model_and_its_adapter_answer_the_openai_client(
    client: openai.AsyncOpenAI,
) -> None:
    models = {model.id for model in (await client.models.list()).data}
    assert models == {OURS.name, "other"}
    said = {}
    for model in sorted(models):
        asked: dict[str, Any] = {
            "model": model,
            "messages": TALK,
            "temperature": 0,
            "max_completion_tokens": 16,
        }
        whole = await client.chat.completions.create(**asked)
        parts = [part async for part in await client.chat.completions.create(**asked, stream=True)]
        said[model] = whole.choices[0].message.content
        assert (
            "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            == said[model]
        )
    assert len(set(said.values())) == 2


async def test_structured_output_keeps_to_its_schema_and_a_broken_one_is_a_bad_request(
    client: openai.AsyncOpenAI,
) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = await client.chat.completions.create(
        model=OURS.name,
        messages=TALK,
        max_completion_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "paint", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["colour"] in ("red", "blue")
    # one that cannot be compiled, and one that never is, or not in any time
    endless = " | ".join("e " * n for n in range(1, 120))
    for wrong in ({"regex": "("}, {"grammar": f"root ::= e\ne ::= {endless}| [a-z]\n"}):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                model=OURS.name, messages=TALK, extra_body={"structured_outputs": wrong}
            )


async def test_acks_tell_of_drafts_prefix_hits_and_the_time_outside_the_model(fleet: Fleet) -> None:
    acks: list[PlanAck] = []
    async with client_of(fleet) as (bus, client, _):
        await bus.subscribe(
            subjects.acked(ReplicaId("r1")), PlanAck, lambda ack, _: acks.append(ack)
        )
        prompt = "The same long beginning. " * 40
        for n in range(3):
            request = GenerateRequest(
                request_id=f"{uuid4().hex}",
                prompt=prompt + str(n),
                sampling=Sampling(max_tokens=80, temperature=0.0),
            )
            delivered = await ask(client, request, "interactive")
            assert delivered.verdict is not None
            assert delivered.verdict.output_tokens == len(delivered.tokens)
        await until_idle(bus, fleet.replicas)
    ran = [ack for ack in acks if ack.plan_seq and ack.slots]
    # all but the last token is the same
    whole_blocks = (delivered.verdict.prompt_tokens - 1) // BLOCK_TOKENS
    assert sum(sum(unpack_list(ack.cached)) for ack in ran) == 2 * whole_blocks * BLOCK_TOKENS
    assert sum(sum(unpack_list(ack.drafted)) for ack in ran) > 0, "nothing was drafted"
    assert all(0 <= ack.outside_s <= ack.exec_s for ack in ran)
    assert any(ack.outside_s for ack in ran)


async def test_a_burst_beyond_the_kv_cache_and_a_killed_worker_lose_no_request_and_repeat_no_token(
    fleet: Fleet,
) -> None:
    async def kill() -> None:
        fleet.process("worker-r1").kill()

    requests = draw_requests(SEED, 30, prompt=(20, 900), output=(5, 60))
    async with client_of(fleet) as (bus, client, wire):
        delivered = await under_load(client, requests, 6.0, kill)
        await check(bus, wire, delivered)
        await until_idle(bus, fleet.replicas)


async def test_what_is_not_vllms_to_say_is_refused_before_anything_starts() -> None:
    spec = FleetSpec(replicas=1, engine="vllm", gateway=False, vllm={"async_scheduling": True})
    with pytest.raises(ChildError, match="async_scheduling"):
        async with Fleet(spec):
            await asyncio.sleep(0)


async def test_what_is_found_of_prompts_is_what_the_simulator_says() -> None:
    spec = FleetSpec(
        replicas=2,
        engine="vllm",
        model=str(OURS),
        vllm={"max_model_len": 2048},
        drain_s=2.0,
        environment={"SLACKLINE_WORKER_PROFILE_S": "3"},
    )
    # its blocks give way in an order of its own
    await check_found(spec, kv_blocks=128, block_tokens=BLOCK_TOKENS, points=4.0)


async def test_what_one_computes_another_goes_on_with_and_says_the_same(case: Any) -> None:
    known = case("ours")
    spec = FleetSpec(
        replicas=2,
        roles=("prefill", "decode"),
        engine="vllm",
        model=str(OURS),
        profile="cpu-tiny",
        vllm={"max_model_len": 2048},
        drain_s=2.0,
    )
    acks: list[PlanAck] = []
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, _):
        await bus.subscribe(
            subjects.acked(ReplicaId("r2")), PlanAck, lambda ack, _: acks.append(ack)
        )
        whole_blocks = 0
        for n in known.firm[:8]:
            prompt, output = known.prompts[n], known.outputs[n]
            request = GenerateRequest(
                request_id=uuid4().hex,
                token_ids=prompt,
                sampling=Sampling(max_tokens=len(output), temperature=0.0, ignore_eos=True),
                slo=Slo(ttft_s=WAIT_S, tbt_s=5.0),
            )
            delivered = await ask(client, request)
            assert delivered.tokens == output
            assert delivered.verdict is not None
            assert (delivered.verdict.replica, delivered.verdict.attempts) == ("r2", 2)
            whole_blocks += len(prompt) // BLOCK_TOKENS
        await until_idle(bus, fleet.replicas)
    found = sum(sum(unpack_list(ack.cached)) for ack in acks if ack.slots)
    assert 0 < found <= whole_blocks * BLOCK_TOKENS
