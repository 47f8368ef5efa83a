"""Tests of the workloads whose prompts begin alike."""

from collections import Counter
from itertools import pairwise

import pytest

from loadgen.load.lengths.alike import SYSTEM
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.session import rounds
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.prefix import Piece
from shared.rules.tiers import DEFAULT


def plan(name: str, requests: int = 60, gap_s: float = 1.0) -> list[PlannedRequest]:
    lengths = named_workload(name, 16_384)
    return plan_requests([n * gap_s for n in range(requests)], lengths, DEFAULT, 1)


def served(
    requests: list[PlannedRequest], kv_blocks: int = 0, host_kv_tokens: int = 0
) -> SimulationResult:
    facts = ReplicaFacts(kv_blocks=kv_blocks, context_tokens=32_768, host_kv_tokens=host_kv_tokens)
    deployment = Deployment("fcfs", "h100-llama3-8b", facts=facts, draft=0.0)
    return simulate(Traffic(requests, DEFAULT), deployment, RunOptions(check_every=500))


def cached_fraction(result: SimulationResult) -> float:
    verdicts = [verdict for verdict in result.verdicts if verdict is not None]
    return sum(v.cached_tokens for v in verdicts) / sum(v.prompt_tokens for v in verdicts)


@pytest.mark.parametrize(("name", "most"), [("chat-sessions", 10), ("agent-loops", 20)])
def test_each_round_begins_with_all_that_was_said_before(name: str, most: int) -> None:
    sessions = rounds(plan(name))
    assert most // 2 < max(len(each) for each in sessions) <= most
    for session in sessions:
        for before, after in pairwise(session):
            assert before.answer is not None
            said = (*before.pieces, Piece(before.answer, before.output_tokens))
            assert after.pieces[: len(said)] == said
            assert after.prompt_tokens + after.output_tokens <= 16_384
    own = [each[0].pieces[1].id for each in sessions]
    assert len(set(own)) == len(own), "sessions share the system prompt and nothing else"
    assert plan(name) == plan(name)


def test_most_of_an_agents_prompts_is_found_again_and_less_where_kv_is_short() -> None:
    requests = plan("agent-loops", 20)
    roomy, short = served(requests), served(requests, kv_blocks=2100)
    assert cached_fraction(roomy) > 0.8
    assert cached_fraction(roomy) > cached_fraction(short) + 0.05
    with_host = served(requests, kv_blocks=2100, host_kv_tokens=1_000_000)
    assert cached_fraction(with_host) > cached_fraction(roomy) - 0.01


def test_some_documents_are_asked_for_far_more_often_than_others() -> None:
    requests = plan("rag", 400)
    first = Counter(request.pieces[1].id for request in requests)
    assert first[SYSTEM + 1] > 5 * first[SYSTEM + 50] and len(first) > 50
    lengths = {(piece.id, piece.tokens) for request in requests for piece in request.pieces}
    assert len(lengths) == len({piece for piece, _ in lengths}), "a document has one length"


def test_one_system_prompt_is_computed_once() -> None:
    requests = plan("system-prompt", 50, gap_s=0.5)
    assert all(request.pieces[0] == Piece(SYSTEM, 3000) for request in requests)
    # 46 whole stretches of 64 tokens, for all but the first
    found = [v.cached_tokens for v in served(requests).verdicts if v is not None]
    assert found[0] == 0 and set(found[5:]) == {46 * 64}
