"""Tests of why a request was late: the main cause of its late token, in words, and its phases."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.core.record.blame import first_missed, main_cause
from shared.core.record.explanation import named, others
from shared.core.record.phases import phases
from shared.measure import Measure
from shared.request_timeline import Account, Cause, Happened, Happening, Neighbour, RequestTimeline
from shared.vocabulary import Missed, Slo

SLO = Slo(ttft_s=0.5, tbt_s=0.03)
ARRIVED = 1000.0
SECONDS = st.integers(0, 640).map(lambda n: n / 64)


def account(**spent: float) -> Account:
    return Account(until_unix_s=ARRIVED + sum(spent.values()), **spent)


@pytest.mark.parametrize(
    ("spent", "due_s", "granted_s", "cause"),
    [
        ({"queue_s": 0.6, "prefill_s": 0.2}, 0.5, 0.0, Cause.QUEUE),
        ({"queue_s": 0.9, "prefill_s": 0.6}, 0.5, 0.0, Cause.PREFILL),  # late even alone
        ({"beside_s": 0.3, "prefill_s": 0.3}, 0.5, 0.0, Cause.BESIDE),
        # 100 tokens at 30 ms: decodes took their time, a queue in the middle made it late
        ({"decodes_s": 2.9, "sat_out_s": 0.7, "prefill_s": 0.1}, 3.47, 2.97, Cause.SAT_OUT),
        ({"decodes_s": 4.1, "sat_out_s": 0.7, "prefill_s": 0.1}, 3.47, 2.97, Cause.DECODES),
        ({"drafts_s": 2.5, "decodes_s": 1.5}, 1.5, 1.0, Cause.DRAFTS),
        ({}, 0.5, 0.0, Cause.PREFILL),
    ],
)
def test_the_main_cause_is_what_took_most_beyond_the_work_that_was_due(
    spent: dict[str, float], due_s: float, granted_s: float, cause: Cause
) -> None:
    assert main_cause(account(**spent), due_s=due_s, granted_s=granted_s) is cause


def test_a_token_that_has_not_come_is_the_first_missed_once_it_is_due() -> None:
    timeline = RequestTimeline(account=account(queue_s=0.7))
    arguments = (SLO, ARRIVED, Measure(), timeline)
    assert first_missed(*arguments, ARRIVED + 0.4, good=False) is None
    found = first_missed(*arguments, ARRIVED + 0.7, good=False)
    assert found is not None
    assert (found.token, found.bound, found.came_s) == (1, Missed.TTFT, None)
    assert found.cause is Cause.QUEUE


def test_an_answer_that_ends_after_its_ttlt_missed_that() -> None:
    slo = Slo(ttlt_s=2.0)
    measure = Measure.begin(slo, ARRIVED).emit(1, ARRIVED + 2.5, slo)
    timeline = RequestTimeline(account=account(decodes_s=1.0, control_s=1.5))
    found = first_missed(slo, ARRIVED, measure, timeline, ARRIVED + 2.5, good=True)
    assert found is not None
    assert (found.token, found.bound, found.due_s, found.came_s) == (0, Missed.TTLT, 2.0, 2.5)
    assert found.cause is Cause.CONTROL


def test_time_does_not_run_backwards_where_clocks_disagree() -> None:
    found = Account().spent(Cause.QUEUE, ARRIVED, ARRIVED + 2.0)
    assert found.spent(Cause.MOVING, ARRIVED, ARRIVED + 1.0) == found


STEPS = st.lists(
    st.builds(
        Happening,
        at_unix_s=SECONDS.map(lambda s: ARRIVED + s),
        what=st.sampled_from(Happened),
        replica=st.sampled_from(["", "r1", "r2"]),
        why=st.sampled_from(["", "relegated", "lost"]),
    ),
    max_size=20,
)


@given(STEPS, SECONDS)
def test_phases_follow_one_another_from_arrival_to_end_without_a_hole(
    steps: list[Happening], life_s: float
) -> None:
    ended = ARRIVED + life_s
    found = phases(RequestTimeline(happenings=tuple(steps)), ARRIVED, ended)
    assert (found[0].start_unix_s, found[-1].end_unix_s) == (ARRIVED, ended)
    for phase, following in pairwise(found):
        assert phase.end_unix_s == following.start_unix_s
        assert phase.start_unix_s < phase.end_unix_s
        assert phase.name != following.name


def test_a_life_in_phases() -> None:
    steps = [
        (0.1, Happened.RELEGATED, "", "no replica can hold its SLO"),
        (0.5, Happened.DRAWN, "r1", ""),
        (0.6, Happened.HELD, "r1", ""),
        (0.9, Happened.BEGAN, "r1", ""),
        (1.0, Happened.FIRST_TOKEN, "r1", ""),
        (1.5, Happened.LEFT, "r1", "lost"),
        (1.7, Happened.HELD, "r2", ""),
        (1.8, Happened.BEGAN, "r2", ""),
    ]
    timeline = RequestTimeline(
        happenings=tuple(
            Happening(at_unix_s=ARRIVED + at, what=what, replica=replica, why=why)
            for at, what, replica, why in steps
        )
    )
    found = phases(timeline, ARRIVED, ARRIVED + 2.0)
    assert [(p.name, p.replica, p.attempt) for p in found] == [
        ("placing", "", 0),
        ("relegated", "", 0),
        ("placing", "r1", 0),
        ("queue", "r1", 1),
        ("iterations", "r1", 1),
        ("moving", "r1", 1),
        ("queue", "r2", 2),
        ("iterations", "r2", 2),
    ]
    assert timeline.waits_for is Cause.CONTROL
    assert replace(timeline, happenings=timeline.happenings[:6]).waits_for is Cause.MOVING
    assert replace(timeline, happenings=timeline.happenings[:1]).waits_for is Cause.RELEGATED


def test_neighbours_in_words() -> None:
    mine, rest = Neighbour("acme", "summary", 3, 1.0), Neighbour("", "", 2, 0.5)
    assert others([mine]) == "3 other requests (3 of acme/summary)"
    assert others([mine, rest]) == "5 other requests (3 of acme/summary, 2 of others)"
    assert others([replace(rest, requests=1)]) == "1 other request"
    assert named(["r1", "r2", "r1", "r3"]) == "r1, r2 and r3"
