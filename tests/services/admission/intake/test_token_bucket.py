"""Tests of the token buckets by which admission limits how many tokens a tenant may use."""

from random import Random

import pytest

from services.admission.intake.token_bucket import TokenBuckets
from shared.rules.tenants import Tenant

LIMITS = Tenant(tokens_s=100.0, burst_tokens=1000.0)
NOW = 1000.0


def test_a_burst_is_let_in_and_the_next_waits_for_what_is_owed() -> None:
    buckets = TokenBuckets()
    assert buckets.wait_s("a", LIMITS, 1, NOW) == 0.0
    buckets.take("a", LIMITS, 1500, 1, NOW)
    assert buckets.wait_s("a", LIMITS, 1, NOW) == 5.0
    assert buckets.wait_s("a", LIMITS, 1, NOW + 4.0) == pytest.approx(1.0)
    assert buckets.wait_s("a", LIMITS, 1, NOW + 5.0) == 0.0
    assert buckets.wait_s("b", LIMITS, 1, NOW) == 0.0


def test_without_a_limit_nobody_waits() -> None:
    buckets = TokenBuckets()
    buckets.take("a", Tenant(), 10**9, 1, NOW)
    assert buckets.wait_s("a", Tenant(), 1, NOW) == 0.0


@pytest.mark.parametrize("admissions", [1, 2, 5])
def test_in_the_long_run_a_tenant_has_its_rate_however_many_admissions_there_are(
    admissions: int,
) -> None:
    each = [TokenBuckets() for _ in range(admissions)]
    rng, had = Random(7), 0
    for step in range(40_000):
        now = NOW + step / 100.0
        buckets = each[rng.randrange(admissions)]
        if buckets.wait_s("a", LIMITS, admissions, now) == 0.0:
            tokens = rng.randint(1, 100)
            buckets.take("a", LIMITS, tokens, admissions, now)
            had += tokens
    assert 0.9 * 400.0 * LIMITS.tokens_s < had < 1.05 * 400.0 * LIMITS.tokens_s + 1000.0


def test_an_idle_tenant_gathers_no_more_than_its_burst() -> None:
    buckets = TokenBuckets()
    buckets.take("a", LIMITS, 1, 1, NOW)
    buckets.take("a", LIMITS, 1100, 1, NOW + 1e6)
    assert buckets.wait_s("a", LIMITS, 1, NOW + 1e6) == pytest.approx(1.0)
