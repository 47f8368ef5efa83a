"""Asks a live fleet questions to documents that its caches cannot keep all at once, and compares
what is found of them with the simulator.
"""

import asyncio
from dataclasses import replace
from random import Random

from loadgen.fleet.fleet import Fleet, FleetSpec
from loadgen.load.mix import PlannedRequest
from loadgen.load.texts.prompts import Prompts
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import simulate
from loadgen.simulator.traffic import Traffic
from shared import subjects
from shared.prefix import Piece
from shared.rules.tiers import DEFAULT
from shared.schemas import GenerateRequest, Sampling
from tests.fleet.live import WAIT_S, ask, client_of

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS, QUESTIONS = 10, 640, 40, 4, 60


async def check_found(
    spec: FleetSpec, *, kv_blocks: int, block_tokens: int, points: float = 2.0
) -> None:
    """Raises AssertionError where the engines find another part of the prompts, by so many points
    of a hundred.
    """
    chance = Random(11)
    planned = [
        PlannedRequest(
            number=n,
            arrival_s=10.0 * n,
            prompt_tokens=DOCUMENT_TOKENS + QUESTION_TOKENS,
            output_tokens=ANSWER_TOKENS,
            tier="chat",
            importance=1.0,
            tenant=subjects.DEFAULT_TENANT,
            application="",
            pieces=(Piece(chance.randrange(DOCUMENTS), DOCUMENT_TOKENS),),
        )
        for n in range(QUESTIONS)
    ]
    facts = ReplicaFacts(kv_blocks=kv_blocks, block_tokens=block_tokens, context_tokens=4096)
    deployment = Deployment(
        "slackline", "cpu-tiny", spec.replicas, latency=Latency.live(), facts=facts
    )
    simulated = simulate(Traffic(planned, DEFAULT), deployment).verdicts
    environment = {**spec.environment, "SLACKLINE_WORKER_KV_BLOCKS": str(kv_blocks)}
    lived, prompts = [], Prompts(11)
    async with (
        Fleet(replace(spec, environment=environment)) as fleet,
        client_of(fleet) as (_, client, _),
        asyncio.timeout(4 * WAIT_S),
    ):
        for each in planned:
            sampling = Sampling(max_tokens=ANSWER_TOKENS, ignore_eos=True)
            asked = GenerateRequest(
                request_id=str(each.number), token_ids=prompts.ids(each), sampling=sampling
            )
            lived.append((await ask(client, asked)).verdict)
    live, said = (
        100 * sum(v.cached_tokens for v in verdicts if v) / sum(r.prompt_tokens for r in planned)
        for verdicts in (lived, simulated)
    )
    print(f"found: live {live:.1f} %, simulated {said:.1f} %")
    assert 20 < said < 80, "this load shows nothing"
    assert abs(live - said) <= points
