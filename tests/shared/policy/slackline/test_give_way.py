"""Tests of the prefills that give way under the policy slackline, where not all can be in time."""

import math
from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.seam import Bools
from shared.policy.slackline.bounds import MARGIN_S, Prefills
from shared.policy.slackline.give_way import Passes, give_way, in_order
from shared.policy.slackline.give_way import _late as walked
from shared.policy.slackline.give_way import _plenty as plenty
from shared.policy.slackline.kv import Room

NO_PASSES = Passes(math.inf, math.inf, math.inf, 0.0, 0.0)


def gone(passes: Passes, *items: tuple[float, float, float]) -> Bools:
    """The prefills that give way, of those by (due, seconds, value); their decodes cost nothing."""
    due, seconds, value = (
        np.array(column, dtype=np.float64) for column in zip(*items, strict=True)
    )
    none, ones = np.zeros(len(items)), np.ones(len(items))
    some = none.astype(np.intp)
    asks = Prefills(some, due, due, some > 0, ones, ones, ones, seconds, none, none, value)
    return give_way(asks, passes)


jobs = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=7)


@given(jobs=jobs)
def test_the_fewest_give_way_and_the_others_are_in_time(jobs: list[tuple[int, int]]) -> None:
    """Moore and Hodgson's rule, against every subset. A batch has a margin after it."""
    items = [(float(due), float(seconds), 1.0) for due, seconds in jobs]

    def in_time(kept: tuple[int, ...]) -> bool:
        end_s = 0.0
        for i in sorted(kept, key=lambda i: items[i][0]):
            end_s += items[i][1]
            if end_s + MARGIN_S > items[i][0]:
                return False
        return True

    lost = gone(NO_PASSES, *items)
    kept = tuple(np.flatnonzero(~lost).tolist())
    assert in_time(kept)
    every = range(len(items))
    assert not any(in_time(more) for more in combinations(every, len(kept) + 1))


@given(jobs=jobs, seconds=st.integers(1, 20), due=st.integers(1, 40))
def test_of_two_alike_the_less_important_gives_way(
    jobs: list[tuple[int, int]], seconds: int, due: int
) -> None:
    others = [(float(d), float(s), 1.0) for d, s in jobs]
    twins = [(float(due), float(seconds), 1.0), (float(due), float(seconds), 2.0)]
    lesser, greater = gone(NO_PASSES, *twins, *others)[:2]
    assert lesser or not greater


@given(jobs=jobs, others=jobs)
def test_important_requests_give_way_only_where_they_do_alone(
    jobs: list[tuple[int, int]], others: list[tuple[int, int]]
) -> None:
    important = [(float(due), float(seconds), 2.0) for due, seconds in jobs]
    rest = [(float(due), float(seconds), 1.0) for due, seconds in others]
    alone = gone(NO_PASSES, *important)
    beside = gone(NO_PASSES, *important, *rest)[: len(jobs)]
    assert np.count_nonzero(beside) == np.count_nonzero(alone)


times = st.floats(0.001, 20.0)


@given(
    asked=st.lists(st.tuples(times, times, times, st.floats(0.0, 0.05), times), max_size=6),
    first_s=st.floats(0.0, 0.2),
    pass_s=st.floats(0.001, 0.1),
    rest_s=st.floats(0.0, 0.2),
    free=st.floats(-5.0, 20.0) | st.none(),
)
def test_where_all_that_is_asked_fits_by_the_first_due_time_the_walk_finds_nobody_late(
    asked: list[tuple[float, ...]], first_s: float, pass_s: float, rest_s: float, free: float | None
) -> None:
    due_s, parts, pace_s, decode_s, tokens = np.array(asked).reshape(-1, 5).T
    none, ones, seconds = np.zeros(len(asked)), np.ones(len(asked)), parts / 20
    some, value, often = none.astype(np.intp), 1.0 + (tokens > 10), 10 * tokens
    asks = Prefills(
        some, due_s, due_s, some > 0, pace_s, pace_s, often, seconds, ones, decode_s, value
    )
    passes = Passes(first_s, first_s + pass_s, pass_s + rest_s, pass_s, pass_s / 2)
    room = None if free is None else Room(free, 1.0, 1.0)
    if plenty(asks, passes, room):
        assert not walked(asks, in_order(asks), passes, room).any()


def test_passes_of_the_decodes_take_time_from_the_prefills() -> None:
    items = [(1.0, 0.5, 1.0)]
    assert not gone(Passes(0.05, 0.09, 0.1, 0.04, 0.01), *items)[0]
    assert gone(Passes(0.05, 0.09, 0.1, 0.06, 0.01), *items)[0]


def test_what_is_due_before_passes_leave_time_gives_way() -> None:
    """Passes of 90 ms every 100: until 150 ms they take 180, and until 3 s 2.79 s."""
    passes = Passes(0.0, 0.09, 0.1, 0.09, 0.05)
    found = gone(passes, (0.15, 0.001, 1.0), (3.0, 0.15, 1.0), (3.0, 0.15, 1.0))
    assert found.tolist() == [True, False, True]
    assert gone(passes, (3.0, 0.15, 1.0)).tolist() == [False]
