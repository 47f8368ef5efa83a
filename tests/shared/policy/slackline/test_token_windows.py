"""Tests of decodes judged by the mean over each ten tokens: what early tokens may be spent on."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy import registry
from shared.policy.seam import Floats, View
from shared.policy.slackline.windows import Windows
from shared.vocabulary import Definition
from tests.shared.policy.views import NOW, Row, decode, entries, view

PACE_S = 0.05
TEN = 10
# gaps between tokens that keep the pace: one window after the other holds
early = st.lists(st.floats(0.001, PACE_S), min_size=0, max_size=25)


def seen_at(at_s: Sequence[float], *, tbt_s: float = PACE_S, slots: Sequence[int] = (3,)) -> View:
    """Decodes whose tokens came at these instants after NOW. The next iteration starts with the
    last of them.
    """
    rows = [
        decode(Row(slot=slot, tbt_s=tbt_s, definition=Definition.MAX_TPOT_10), generated=len(at_s))
        for slot in slots
    ]
    return dataclasses.replace(
        view(rows),
        start_unix_s=NOW + at_s[-1],
        first_token_unix_s=np.full(len(rows), NOW + at_s[0]),
        newest_token_unix_s=np.full(len(rows), NOW + at_s[-1]),
    )


class NextToken(NamedTuple):
    due_s: Floats
    latest_s: Floats


def next_token(windows: Windows, at_s: Sequence[float], step_s: float = 0.02) -> NextToken:
    seen = seen_at(at_s)
    return NextToken(*windows.next_tokens(seen, np.arange(seen.rows), np.full(seen.rows, step_s)))


def after(gaps: Sequence[float]) -> tuple[Windows, list[float]]:
    """The windows that have seen tokens so far apart, and the instants of these."""
    windows, at_s = Windows(), [0.0]
    next_token(windows, at_s)
    for gap in gaps:
        at_s.append(at_s[-1] + gap)
        next_token(windows, at_s)
    return windows, at_s


def worst_s(at_s: Sequence[float]) -> float:
    """The worst mean pace over ten tokens, and over all while there are fewer."""
    if len(at_s) <= TEN:
        return (at_s[-1] - at_s[0]) / max(len(at_s) - 1, 1)
    return max((at_s[n + TEN] - at_s[n]) / TEN for n in range(len(at_s) - TEN))


@given(gaps=early, more=st.integers(1, 30))
def test_tokens_that_come_when_they_are_due_keep_every_window(gaps: list[float], more: int) -> None:
    windows, at_s = after(gaps)
    for _ in range(more):
        due_s = float(next_token(windows, at_s).due_s[0])
        at_s.append(at_s[-1] + due_s)
        assert worst_s(at_s) <= PACE_S + 1e-9
    assert due_s > 0.0


@given(gaps=early, step_s=st.floats(0.005, PACE_S))
def test_one_token_may_come_at_its_latest_if_those_after_it_come_one_iteration_after_the_other(
    gaps: list[float], step_s: float
) -> None:
    windows, at_s = after(gaps)
    latest_s = float(next_token(windows, at_s, step_s).latest_s[0])
    assert latest_s >= PACE_S - 1e-9
    at_s.append(at_s[-1] + latest_s)
    for _ in range(TEN):
        assert worst_s(at_s) <= PACE_S + 1e-9
        at_s.append(at_s[-1] + step_s)


def test_what_was_early_is_put_off_once() -> None:
    """Ten tokens each 20 ms early leave 0.2 s, and no more after that was spent."""
    windows, at_s = Windows(), [0.03 * n for n in range(12)]
    for n in range(12):
        next_token(windows, at_s[: n + 1])
    latest_s = float(next_token(windows, at_s, step_s=0.03).latest_s[0])
    assert latest_s == pytest.approx(0.03 + TEN * 0.02)
    at_s.append(at_s[-1] + latest_s)
    spent = next_token(windows, at_s, step_s=0.03)
    assert float(spent.due_s[0]) == pytest.approx(0.03)


def test_tokens_that_came_between_two_views_came_evenly() -> None:
    one, other = Windows(), Windows()
    at_s = [0.03 * n for n in range(16)]
    for n in range(16):
        step_by_step = next_token(one, at_s[: n + 1])
    next_token(other, at_s[:1])
    assert next_token(other, at_s).due_s == pytest.approx(step_by_step.due_s)


def test_another_request_in_a_slot_has_no_tokens_of_the_one_before() -> None:
    windows, at_s = Windows(), [0.01 * n for n in range(12)]
    for n in range(12):
        next_token(windows, at_s[: n + 1])
    other = dataclasses.replace(seen_at([1.0, 1.05]), arrived_unix_s=np.array([NOW + 0.9]))
    due_s = windows.next_tokens(other, np.arange(1), np.array([0.02]))[0]
    assert float(due_s[0]) == pytest.approx(PACE_S)


@pytest.mark.parametrize(("every_s", "alone"), [(0.02, True), (0.03, False)])
def test_decodes_that_are_early_in_their_windows_sit_out_for_a_prompt_that_is_due(
    every_s: float, alone: bool
) -> None:
    """Beside the decodes the prompt would be late; alone it is in time. That keeps the decodes
    waiting beyond one pace, but those that were early in no window of ten tokens.
    """
    policy, slots, tbt_s = registry.make("slackline"), range(40), 0.03
    at_s = [every_s * n for n in range(15)]
    for n in range(15):
        policy.plan(seen_at(at_s[: n + 1], tbt_s=tbt_s, slots=slots))
    decodes = [
        decode(Row(slot=n, tbt_s=tbt_s, definition=Definition.MAX_TPOT_10), generated=15)
        for n in slots
    ]
    prompt = Row(slot=50, target=300, arrived_s=at_s[-1], ttft_s=0.036, tbt_s=tbt_s)
    seen = dataclasses.replace(
        view([*decodes, prompt]),
        start_unix_s=NOW + at_s[-1],
        first_token_unix_s=np.array([NOW + at_s[0]] * 40 + [math.inf]),
        newest_token_unix_s=np.array([NOW + at_s[-1]] * 40 + [math.inf]),
    )
    assert (list(entries(policy.plan(seen)[0])) == [50]) is alone
