"""Tests of the order in which idle blocks give way."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.core.prefixes.idle import Idle


def test_the_block_left_longest_ago_goes_first_and_one_that_is_kept_so_much_later() -> None:
    idle = Idle()
    idle.add(1, 0.0, 4.0)
    idle.add(2, 1.0, 0.0)
    idle.add(3, 3.0, 0.0)
    idle.add(4, 5.0, 0.0)
    assert [idle.pop() for _ in range(4)] == [2, 3, 1, 4]


@given(st.integers(0, 1 << 32))
def test_blocks_go_by_the_instant_until_which_they_are_kept(seed: int) -> None:
    rng, idle, until, now_s = Random(seed), Idle(), dict[int, float](), 0.0
    for block in range(60):
        now_s += rng.choice([0.0, 0.5, 3.0])
        if until and rng.random() < 0.3:
            gone = until.pop(idle.pop())
            assert all(gone <= other for other in until.values())
        if until and rng.random() < 0.2:
            taken = rng.choice(sorted(until))
            idle.discard(taken)
            del until[taken]
        keep_s = rng.choice([0.0, 0.0, 1.0, 4.0, 32.0])
        idle.add(block, now_s, keep_s)
        until[block] = now_s + keep_s
        assert set(idle) == set(until) and len(idle) == len(until)
