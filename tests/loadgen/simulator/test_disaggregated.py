"""Prefill and decode replicas with a link: DistServe's deployment."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import CHATBOT, Synthetic
from loadgen.simulator.deployment import ReplicaFacts
from loadgen.simulator.disaggregated import PREFILL_TOKENS, Split, simulate_disaggregated
from loadgen.simulator.simulation import SimulationResult
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.shape import BatchShape
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

NAME = "a100-llama2-7b"
FILE = profiles.read(NAME)
PROFILE = FILE.profile()
TIERS = TierSet(name="t", default="chat", tiers={"chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1))})


def planned(number: int, at_s: float, prompt: int, output: int) -> PlannedRequest:
    return PlannedRequest(number, at_s, prompt, output, "chat", 1.0, "t", "chat")


def served(
    *requests: PlannedRequest, split: Split | None = None, kv_blocks: int = 0
) -> SimulationResult:
    facts = ReplicaFacts(kv_blocks=kv_blocks)
    return simulate_disaggregated(Traffic(requests, TIERS), NAME, facts, split or Split())


def prefill_s(tokens: int) -> float:
    return PROFILE.batch_s(BatchShape().with_chunk(tokens, 0))


def decode_s(context: int) -> float:
    return PROFILE.batch_s(BatchShape(decodes=1, decode_context=context))


def test_a_token_from_the_prefill_replica_the_kv_over_the_link_and_the_rest_where_it_decodes() -> (
    None
):
    """1,000 tokens of 512 KiB at 100 GB/s take 5.2 ms."""
    result = served(planned(0, 1.0, 1000, 3), split=Split(link_bytes_per_s=100e9))
    assert result.token_unix_s is not None
    first_s = 1.0 + prefill_s(1000)
    second_s = first_s + 1000 * FILE.kv_bytes_per_token / 100e9 + decode_s(1000)
    assert list(result.token_unix_s[0]) == pytest.approx(
        [first_s, second_s, second_s + decode_s(1001)]
    )


def test_short_prompts_share_a_batch_and_long_ones_do_not() -> None:
    half = PREFILL_TOKENS // 2
    requests = [planned(n, 0.0, tokens, 1) for n, tokens in enumerate((half, half, half, half))]
    result = served(planned(9, 0.0, 2000, 1), *requests)
    assert result.token_unix_s is not None
    ends = [times[0] for times in result.token_unix_s]
    assert ends[1] == ends[2] < ends[3] == ends[4]
    two_s = PROFILE.batch_s(BatchShape().with_chunk(half, 0).with_chunk(half, 0))
    assert ends[3] - ends[1] == pytest.approx(two_s)


def test_a_request_waits_on_the_prefill_replica_until_its_whole_output_has_room() -> None:
    """Each holds 120 tokens in the end; a replica has 160."""
    result = served(*(planned(n, 0.0, 100, 20) for n in range(2)), kv_blocks=10)
    assert result.token_unix_s is not None
    first, second = result.token_unix_s
    assert second[1] > first[-1]


def test_more_replicas_of_each_kind_share_the_work() -> None:
    requests = [planned(n, 0.0, 2000, 50) for n in range(4)]
    one, two = served(*requests), served(*requests, split=Split(prefill=2, decode=2))
    assert two.simulated_s < one.simulated_s


@given(
    seed=st.integers(0, 1000),
    prefill=st.integers(1, 2),
    decode=st.integers(1, 2),
    kv_blocks=st.sampled_from([0, 600]),
)
@settings(deadline=None, max_examples=10, derandomize=True)
def test_every_request_ends_with_all_its_tokens_in_order(
    seed: int, prefill: int, decode: int, kv_blocks: int
) -> None:
    source = Synthetic((CHATBOT,), 8192)
    requests = plan_requests(draw_arrivals(Gaps(), 8.0, 10.0, seed), source, TIERS, seed=seed)
    result = served(*requests, split=Split(prefill=prefill, decode=decode), kv_blocks=kv_blocks)
    assert result.token_unix_s is not None
    for request, times in zip(requests, result.token_unix_s, strict=True):
        assert len(times) == request.output_tokens
        assert times[0] > request.arrival_s
        assert all(before < after for before, after in pairwise(times))


def test_rounds_thinking_and_what_no_replica_holds_are_refused() -> None:
    one = planned(0, 0.0, 100, 20)
    for request in (
        one._replace(after=0),
        one._replace(thinking_tokens=5),
        one._replace(output_tokens=200_000),
    ):
        with pytest.raises(ConfigError):
            served(request)
