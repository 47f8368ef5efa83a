"""Requests of a recorded trace: the halves, the rate, and what a seed changes."""

import pytest

from loadgen.lab.papers.run import KEPT, Half, recorded_requests
from loadgen.load.trace import Trace, TraceRow
from shared.errors import ConfigError
from shared.rules.tiers import DEMO_3

# 4,000 requests in 1,000 s; the prompt of each is its number
TRACE = Trace("made-up", [TraceRow(n / 4, n + 1, 10, "app") for n in range(4000)])


def prompts(
    half: Half, seed: int = 1, rate_rps: float = 3.2, duration_s: float = 1e9
) -> list[tuple[float, int]]:
    requests = recorded_requests(
        TRACE, half, rate_rps=rate_rps, duration_s=duration_s, tiers=DEMO_3, seed=seed
    )
    return [(request.arrival_s, request.prompt_tokens) for request in requests]


def test_each_half_has_its_own_requests_in_the_order_recorded() -> None:
    first = [tokens for _, tokens in prompts(Half.FIRST)]
    second = [tokens for _, tokens in prompts(Half.SECOND)]
    assert first == sorted(first) and second == sorted(second)
    assert max(first) <= 2000 < min(second)


def test_a_seed_draws_most_of_the_rows_and_another_seed_others() -> None:
    one, other = ({tokens for _, tokens in prompts(Half.SECOND, seed)} for seed in (1, 2))
    assert len(one) == pytest.approx(KEPT * 2000, rel=0.05)
    assert one != other and prompts(Half.SECOND, 1) == prompts(Half.SECOND, 1)


@pytest.mark.parametrize("rate_rps", [0.5, 3.2, 20.0])
def test_time_is_stretched_to_the_rate_and_gaps_keep_their_ratio(rate_rps: float) -> None:
    usual, found = prompts(Half.FIRST), prompts(Half.FIRST, rate_rps=rate_rps)
    assert [tokens for _, tokens in found] == [tokens for _, tokens in usual]
    assert len(found) / found[-1][0] == pytest.approx(rate_rps, rel=0.01)
    times = found[-1][0] / usual[-1][0]
    for (was_s, _), (is_s, _) in zip(usual, found, strict=True):
        assert is_s == pytest.approx(times * was_s)


def test_no_request_comes_after_the_end() -> None:
    found = prompts(Half.SECOND, duration_s=60.0)
    assert len(found) == pytest.approx(3.2 * 60, rel=0.1)
    assert all(0 <= arrival_s < 60.0 for arrival_s, _ in found)


def test_a_trace_without_times_is_refused() -> None:
    lengths = Trace("lengths", [TraceRow(None, 10, 10, "")])
    with pytest.raises(ConfigError, match="lengths has no arrival times"):
        recorded_requests(lengths, Half.FIRST, rate_rps=1.0, duration_s=1.0, tiers=DEMO_3, seed=1)
