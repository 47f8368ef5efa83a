"""Tests of the number of replicas that compute prompts only (docs/apart.md)."""

from hypothesis import given
from hypothesis import strategies as st

from shared.core.scaling.roles import Work, prompts_only
from shared.core.scaling.trend import LATE_S
from shared.vocabulary import ReplicaId, Role, Slo
from tests.shared.core.scaling.test_scaling import Load, announce, digest

SECONDS = st.floats(0.0, 50.0)


def test_a_pace_that_leaves_little_time_beside_passes_sets_prompts_apart() -> None:
    tight = Work(prefill_s=2.0, decode_s=0.5, move_s=0.1, share=0.3)
    assert prompts_only(tight, 8) == 4  # each half busy; together each would be all
    assert prompts_only(tight._replace(share=0.95), 8) == 0


def test_a_slow_link_keeps_them_together() -> None:
    assert prompts_only(Work(prefill_s=2.0, decode_s=0.5, move_s=8.0, share=0.3), 8) == 0


def test_one_replica_serves_both() -> None:
    assert prompts_only(Work(1.0, 1.0, 0.0, 0.1), 1) == 0


@given(SECONDS, SECONDS, SECONDS, st.floats(0.1, 1.0), st.integers(1, 30))
def test_no_replica_has_more_to_do_than_together(
    prefill_s: float, decode_s: float, move_s: float, share: float, replicas: int
) -> None:
    count = prompts_only(Work(prefill_s, decode_s, move_s, share), replicas)
    assert 0 <= count < replicas
    if count:
        together = (prefill_s + decode_s) / share / replicas
        assert prefill_s / count < together
        assert decode_s / share / (replicas - count) < together
        assert move_s / (replicas - count) < together


def roles(
    load: Load, role: Role, tbt_s: float, kv_move_s: float = 1e-6, pace: float = 1.0
) -> list[tuple[ReplicaId, ...]]:
    """The replicas that compute prompts only, in each second of a load of long prompts."""
    told = []
    for name in ("r1", "r2", "r3", "r4"):
        load.core.announced(announce(name, role=role, kv_move_s=kv_move_s, pace=pace))
    for _ in range(3 * LATE_S):
        for name in ("r1", "r2", "r3", "r4"):
            load.core.heard(digest(name, load.now_s), load.now_s)
        told.append(load.second({"tight": 15}, {"tight": Slo(ttft_s=1.0, tbt_s=tbt_s)}).prefill)
    return told


def test_replicas_whose_role_is_not_fixed_follow_the_load() -> None:
    tight = roles(Load(), Role.AUTO, 0.012)[-1]
    assert tight and set(tight) < {"r1", "r2", "r3", "r4"}
    assert roles(Load(), Role.AUTO, 0.2)[-1] == ()
    assert roles(Load(), Role.BOTH, 0.012)[-1] == ()


def test_a_gpu_and_a_link_that_are_both_half_as_fast_have_the_same_roles() -> None:
    fast = roles(Load(), Role.AUTO, 0.012, kv_move_s=1.2e-4)[-1]
    assert fast and roles(Load(), Role.AUTO, 0.024, kv_move_s=2.4e-4, pace=2.0)[-1] == fast


def test_a_role_lasts_for_half_a_minute() -> None:
    told = roles(Load(), Role.AUTO, 0.012)
    changes = [n for n in range(1, len(told)) if told[n] != told[n - 1]]
    assert changes and all(n % LATE_S == 0 for n in changes)
