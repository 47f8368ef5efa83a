"""Tests of the estimate of how fast replicas take work out of the best-effort pool."""

import pytest

from shared.core.relegation.pool_rate import LEAST, PRIOR, PoolRate
from tests.shared.core.pooled import pooled

IDLE_TOKENS_S = 20_000.0


def test_before_anything_is_seen_a_small_part_of_an_idle_fleet_is_promised() -> None:
    """A flood fills a pool in a second, and what it leaves of the fleet is seen later."""
    assert PoolRate().tokens_s(IDLE_TOKENS_S) == pytest.approx(PRIOR * IDLE_TOKENS_S)


def test_a_fleet_that_takes_much_is_seen_within_a_second() -> None:
    drain = PoolRate()
    for n in range(10):
        drain.waited(0.1)
        drain.took(pooled(f"a.{n}", prompt_tokens=1990))  # 20,000 tokens a second
    assert drain.tokens_s(IDLE_TOKENS_S) > 0.25 * IDLE_TOKENS_S


def test_it_comes_near_what_the_fleet_takes_within_two_minutes() -> None:
    drain = PoolRate()
    for n in range(1200):
        drain.waited(0.1)
        drain.took(pooled(f"a.{n}", prompt_tokens=490))  # 5,000 tokens a second
    for idle_tokens_s in (0.0, IDLE_TOKENS_S):
        assert drain.tokens_s(idle_tokens_s) == pytest.approx(5000, rel=0.05)


def test_a_fleet_that_takes_nothing_is_slow_but_not_still() -> None:
    drain = PoolRate()
    for _ in range(3000):
        drain.waited(0.1)
    assert drain.tokens_s(IDLE_TOKENS_S) == pytest.approx(LEAST * IDLE_TOKENS_S, rel=0.01)


def test_what_a_replica_gives_back_was_not_done() -> None:
    drain, same = PoolRate(), PoolRate()
    drain.waited(1.0)
    same.waited(1.0)
    drain.took(pooled("a.1"))
    drain.entered(pooled("a.1"))
    drain.entered(pooled("a.2"))  # new
    assert drain.tokens_s(IDLE_TOKENS_S) == same.tokens_s(IDLE_TOKENS_S)
