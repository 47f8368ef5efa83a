"""Tests of live fleets in which one replica computes prompts and another decodes: answers are those
of replicas that do both, whoever is killed while KV moves.
"""

from collections.abc import AsyncIterator
from dataclasses import replace
from random import Random

import pytest
import pytest_asyncio

from loadgen.fleet.fleet import Fleet, FleetSpec
from shared import subjects
from shared.schemas import Explain, Explanation, GenerateRequest, Sampling
from shared.vocabulary import HANDED_OVER
from tests.fleet.faults.test_kill import survive
from tests.fleet.live import WAIT_S, Delivered, ask, client_of
from tests.rings import slow_but

SEED = 20_261_130
SPEC = FleetSpec(replicas=2, engine="torch", profile="cpu-tiny", drain_s=2.0)
APART = replace(SPEC, roles=("prefill", "decode"))


def questions(n: int) -> list[GenerateRequest]:
    """Greedy and sampled requests, with prompts of up to some thousand characters."""
    rng = Random(SEED)
    return [
        GenerateRequest(
            request_id=f"apart-{i}",
            prompt="".join(rng.choices("abcdefgh ", k=rng.randint(50, 3000))),
            sampling=Sampling(max_tokens=20, temperature=float(i % 2), ignore_eos=True),
        )
        for i in range(n)
    ]


async def answers(spec: FleetSpec) -> tuple[list[Delivered], list[Explanation]]:
    """The answers of such a fleet to all questions, one after another, and how they came about."""
    delivered, explained = [], []
    async with Fleet(spec) as fleet, client_of(fleet) as (bus, client, _):
        for request in questions(8):
            delivered.append(await ask(client, request))
            explain = Explain(request_id=request.request_id)
            subject = subjects.explain(subjects.DEFAULT_TENANT)
            explained.append(await bus.request(subject, explain, Explanation, timeout_s=WAIT_S))
    return delivered, explained


@pytest.mark.slow
async def test_prompts_here_and_answers_there_give_what_two_that_do_both_give() -> None:
    pytest.importorskip("torch")
    together, _ = await answers(SPEC)
    apart, explained = await answers(APART)
    assert [one.tokens for one in apart] == [one.tokens for one in together]
    assert [one.text for one in apart] == [one.text for one in together]
    for one, why in zip(apart, explained, strict=True):
        assert one.verdict is not None and (one.verdict.replica, one.verdict.attempts) == ("r2", 2)
        left = [step for step in why.happenings if step.why == HANDED_OVER]
        assert [step.replica for step in left] == ["r1"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet() -> AsyncIterator[Fleet]:
    environment = {"SLACKLINE_WORKER_PREFIX_CACHING": "true"}
    async with Fleet(
        FleetSpec(replicas=2, roles=("prefill", "decode"), drain_s=2.0, environment=environment)
    ) as fleet:
        yield fleet


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("killed", slow_but(["worker-r1"], ["worker-r1", "worker-r2"]))
async def test_nothing_is_lost_when_either_is_killed_while_kv_moves(
    fleet: Fleet, killed: str
) -> None:
    victim = fleet.process(killed)
    starts = victim.starts
    await survive(fleet, victim.kill, SEED + len(killed), killed.removeprefix("worker-"))
    assert victim.starts == starts + 1
