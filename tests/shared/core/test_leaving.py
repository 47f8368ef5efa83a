"""Tests of Leaving: which requests a replica that leaves gives up, in which order, and when."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.leaving import Leaving
from shared.policy.seam import View
from tests.made import announce
from tests.shared.policy.views import NOW, Row, decode, interactive, rows, summary, view


def leaving(*, after_s: float = 8.0, receivers: int = 1, **facts: Any) -> Leaving:
    made = Leaving()
    made.heard(announce(leaves_unix_s=NOW + after_s, **facts), receivers)
    return made


def long(row: Row, context: int = 2000) -> Row:
    """A decode that would go on for hours."""
    return decode(replace(row, max_tokens=1_000_000), context=context)


def moves(leaves: Leaving, held: list[Row], *, until_s: float) -> list[tuple[int, float]]:
    """The slots that move, each with its time, while the replica plans every 10 ms."""
    moved: list[tuple[int, float]] = []
    left = list(held)
    for step in range(int(until_s * 100)):
        seen = at(view(left), step / 100)
        now = leaves.give_up(seen)
        moved += [(slot, step / 100) for slot in now]
        left = [row for row in left if row.slot not in now]
    return moved


def at(seen: View, after_s: float) -> View:
    seen.start_unix_s = NOW + after_s
    return seen


def test_a_replica_that_stays_or_has_nobody_to_give_to_gives_nothing_up() -> None:
    held = [interactive(0), long(interactive(1))]
    assert not Leaving()
    assert leaving(receivers=0).give_up(view(held)) == []


def test_what_has_nothing_computed_moves_at_once() -> None:
    held = [interactive(0), summary(1), long(summary(2)), interactive(3)]
    assert {0, 1, 3} <= set(leaving().give_up(view(held)))


def test_what_ends_here_in_time_stays_and_is_moved_once_it_would_not() -> None:
    ends = decode(interactive(0, max_tokens=100))  # 10 ms a token
    assert leaving(after_s=8.0).give_up(view([ends])) == []
    assert leaving(after_s=0.5).give_up(view([ends])) == [0]


def test_the_most_slack_moves_first_and_best_effort_before_it() -> None:
    held = [
        long(interactive(0, next_due_s=0.1)),
        long(interactive(1, next_due_s=3.0)),
        long(interactive(2, next_due_s=0.2, best_effort=True)),
        long(interactive(3, next_due_s=1.0)),
    ]
    order = [slot for slot, _ in moves(leaving(), held, until_s=8.0)]
    assert order == [2, 1, 3, 0]


@pytest.mark.parametrize("receivers", [1, 3])
def test_the_next_moves_when_the_receivers_have_computed_the_one_before(receivers: int) -> None:
    held = [long(interactive(slot, next_due_s=slot)) for slot in range(5)]
    times = [at_s for _, at_s in moves(leaving(receivers=receivers), held, until_s=8.0)]
    # 2,000 tokens of 80 us, and 20 us of each for the iterations around it
    between_s = 2000 * 1.0e-4 / receivers
    for before, after in pairwise(times):
        assert after - before == pytest.approx(between_s, rel=0.2)


def test_kv_that_is_fetched_lets_them_move_as_fast_as_it_moves() -> None:
    held = [long(interactive(slot, next_due_s=slot)) for slot in range(5)]
    fetched = leaving(kv_address="host:1", kv_move_s=1e-5)
    times = [at_s for _, at_s in moves(fetched, held, until_s=8.0)]
    for before, after in pairwise(times):
        assert after - before == pytest.approx(2000 * 1e-5, abs=0.011)


def test_all_move_in_time_where_the_receivers_could_not_compute_them_so_fast() -> None:
    held = [long(interactive(slot), context=8000) for slot in range(20)]  # 20 times 0.8 s
    moved = moves(leaving(after_s=4.0), held, until_s=4.0)
    assert sorted(slot for slot, _ in moved) == list(range(20))
    assert moved[10][1] > 1.0, "they move in turn all the same"


@given(held=rows(), receivers=st.integers(0, 3))
def test_nobody_moves_twice_and_only_the_held_move(held: list[Row], receivers: int) -> None:
    slots = leaving(receivers=receivers).give_up(view(held))
    assert len(slots) == len(set(slots))
    assert set(slots) <= {row.slot for row in held}
