"""Tests of live prompts: their token ids begin alike where the plan says so."""

from itertools import combinations, takewhile

from loadgen.load.mix import plan_requests
from loadgen.load.session import rounds
from loadgen.load.texts.prompts import Prompts, prompt_ids
from loadgen.load.workload import named_workload
from shared.prefix import Chain, Piece, chain_of, chain_of_pieces
from shared.rules.tiers import DEFAULT


def alike(one: Chain, other: Chain) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def test_prompts_of_ids_share_what_their_pieces_do() -> None:
    requests = plan_requests([0.0] * 12, named_workload("rag", 8192), DEFAULT, 1)
    prompts = Prompts(3)
    ids = [prompts.ids(request) for request in requests]
    assert [len(each) for each in ids] == [request.prompt_tokens for request in requests]
    for one, other in combinations(range(12), 2):
        by_pieces = [
            chain_of_pieces([*r.pieces, Piece(-1 - r.number, r.prompt_tokens)])
            for r in (requests[one], requests[other])
        ]
        assert alike(chain_of(ids[one]), chain_of(ids[other])) == alike(*by_pieces)
    assert all(32 <= token < 127 for each in ids for token in each)
    assert [Prompts(3).ids(request) for request in requests] == ids


def test_a_later_round_has_the_answer_as_it_came() -> None:
    plan = plan_requests([0.0] * 8, named_workload("agent-loops", 8192), DEFAULT, 1)
    first, second, *_ = next(each for each in rounds(plan) if len(each) > 2)
    prompts, answer = Prompts(1), list(range(200, 200 + first.output_tokens))
    before = prompts.ids(first)
    prompts.answered(first, answer[:5])
    prompts.answered(first, answer[5:])
    after = prompts.ids(second)
    assert after[: len(before)] == before
    assert after[len(before) : len(before) + len(answer)] == answer
    assert len(after) == second.prompt_tokens


def test_a_request_that_shares_nothing_has_the_prompt_that_it_always_had() -> None:
    request = plan_requests([0.0], named_workload("mix", 8192), DEFAULT, 1)[0]
    assert Prompts(5).ids(request) == prompt_ids(5, request.number, request.prompt_tokens)
