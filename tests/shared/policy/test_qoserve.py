"""Tests of the policy QoServe: chunks from slack, hybrid priority, relegation with hints, selective
preemption, learned lengths.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given

from shared.perf import profile_file as store
from shared.perf.shape import BatchShape
from shared.policy import chunk, registry
from shared.policy.lengths import OutputLengths
from shared.policy.qoserve import QoServe, Queue, Settings
from shared.policy.seam import Ended, Observation, Phase, View
from tests.shared.policy.views import (
    NOW,
    Linear,
    Row,
    decode,
    entries,
    interactive,
    rows,
    shape_of,
    summary,
    view,
    views,
)

PROFILES = [Linear(), *(store.load(name) for name in ("a100-llama3-8b", "a100-llama3-8b-qoserve"))]


def qoserve(**changed: object) -> QoServe:
    return QoServe(Settings(**changed))  # type: ignore[arg-type]


def after(outputs: int, policy: QoServe) -> QoServe:
    """The policy once ten requests of application "a" have put out so many tokens each."""
    ended = [Ended("a", 10, 5000, outputs) for _ in range(10)]
    policy.observe(Observation(NOW, BatchShape(), 0.0, 0.0, ended))
    return policy


def prefill_order(policy: QoServe, made: Sequence[Row]) -> list[int]:
    waiting = {r.slot for r in made if r.phase != Phase.DECODE}
    return [slot for slot in entries(policy.plan(view(made))[0]) if slot in waiting]


def prefill_tokens(seen: View, policy: QoServe) -> int:
    return shape_of(seen, policy.plan(seen)[0]).prefill_tokens


# ---------------------------------------------------------------- dynamic chunking (section 3.3)


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
@given(made=rows())
def test_predicted_time_times_safety_fits_the_smallest_slack(
    profile: Linear, made: list[Row]
) -> None:
    seen, policy = view(made, profile=profile), qoserve()
    shape = shape_of(seen, policy.plan(seen)[0])
    if shape.prefills:
        slack_s = policy.slack_s(seen, chunk.decoding(seen))
        assert profile.batch_s(shape) * 1.2 <= slack_s + 1e-9
    assert shape.prefill_tokens <= 2500


def test_non_interactive_decodes_ask_for_their_share_of_the_time_left() -> None:
    policy = after(105, qoserve())
    relaxed_one = decode(summary(0))  # 600 s for 100 tokens more
    tight = decode(summary(0, ttlt_s=10.0))  # 0.1 s a token
    for row, slack_s in ((relaxed_one, 0.4), (tight, 0.1)):
        seen = view([row])
        assert policy.slack_s(seen, chunk.decoding(seen)) == pytest.approx(slack_s)


def test_an_end_that_no_pace_can_reach_in_time_does_not_stop_all_prefill() -> None:
    waiting = summary(1, target=6000)
    policy = after(105, qoserve())
    for ttlt_s in (-1.0, 0.0, 0.1):  # 100 tokens more are expected
        assert prefill_tokens(view([decode(summary(0, ttlt_s=ttlt_s)), waiting]), policy) == 2500
    assert 0 < prefill_tokens(view([decode(summary(0, ttlt_s=5.0)), waiting]), policy) < 500


def test_example_of_section_3_5() -> None:
    """A is interactive, B to E are not. A's prefill comes first. Its slack then goes to the
    requests due soonest, in large chunks. Once the slack is spent the chunks are small; with A gone
    they are large again.
    """
    others = [
        summary(slot, target=2000, ttlt_s=due)
        for slot, due in ((1, 300.0), (2, 900.0), (3, 200.0), (4, 900.0))
    ]
    policy = qoserve()
    assert prefill_order(policy, [*others, interactive(0, target=500)])[:2] == [0, 3]
    early = view([decode(interactive(0, next_due_s=3.0), context=500, generated=1), *others])
    assert list(entries(policy.plan(early)[0])) == [0, 3, 1]
    late = view([decode(interactive(0, next_due_s=0.05), context=500, generated=60), *others])
    assert prefill_tokens(early, policy) > 5 * prefill_tokens(late, policy) > 0
    assert prefill_tokens(view(others), policy) == 2500


# ---------------------------------------------------------------- hybrid priority (Eq. 4 and 5)


def test_alpha_follows_the_load_from_one_to_eight_milliseconds() -> None:
    policy = qoserve()
    assert [policy.alpha_s(load) for load in (0.0, 0.25, 0.5, 0.75, 9.0)] == pytest.approx(
        [0.001, 0.001, 0.0045, 0.008, 0.008]
    )


def test_load_is_the_backlog_against_the_time_there_is() -> None:
    made = [interactive(i, target=8000) for i in range(3)] + [summary(9, target=80)]
    queue = Queue(view(made), OutputLengths(), 8000.0, 0.0)
    assert queue.load(NOW, queue.standard) == pytest.approx(0.5)  # 3 s of prefill, 6 s to do it in
    assert queue.load(NOW, ~queue.standard) == 0.0


# ---------------------------------------------------------------- relegation


@given(seen=views)
def test_a_request_past_its_first_deadline_is_relegated_and_never_precedes_a_standard_one(
    seen: View,
) -> None:
    (choice,) = qoserve().plan(seen)
    past = (
        (seen.phase != Phase.DECODE)
        & ~seen.best_effort
        & (np.minimum(seen.next_due_unix_s, seen.last_due_unix_s) < NOW)
    )
    assert set(choice.relegate) >= set(seen.slot[past].tolist())
    standard = set(seen.slot[~seen.best_effort].tolist())
    assert set(choice.relegate) <= standard
    planned = entries(choice)
    begun = set(seen.slot[seen.phase != Phase.WAITING].tolist())
    # it leaves the replica
    assert not {s for s in choice.relegate if s in planned and s not in begun}


def test_what_prefill_alone_would_make_late_is_relegated_before_it_is_late() -> None:
    policy = qoserve()
    policy.observe(Observation(NOW, BatchShape(prefill_tokens=1000), 0.1, 0.1))  # 10,000 tokens/s
    made = [
        interactive(0, target=5000, next_due_s=0.4),
        interactive(1, target=5000, next_due_s=0.6),
    ]
    (choice,) = policy.plan(view(made))
    assert list(choice.relegate) == [0]
    assert list(entries(choice)) == [1]


def test_the_less_important_go_first_and_only_as_many_as_rescue_the_important() -> None:
    policy = qoserve(hybrid=False)
    # 10,000 tokens/s: each of these takes 0.5 s
    policy.observe(Observation(NOW, BatchShape(prefill_tokens=1000), 0.1, 0.1))
    free = [interactive(i, target=5000, next_due_s=2.0 + i / 64, importance=0.5) for i in range(3)]
    paid = interactive(9, target=5000, next_due_s=2.1, importance=1.0)
    also = interactive(10, target=5000, next_due_s=2.2, importance=1.0)
    assert list(policy.plan(view([*free, paid]))[0].relegate) == []
    (choice,) = policy.plan(view([*free, paid, also]))
    assert len(choice.relegate) == 1
    assert set(choice.relegate) <= {0, 1, 2}


def test_nobody_is_given_up_for_one_who_would_be_late_all_the_same() -> None:
    policy = qoserve(hybrid=False)
    policy.observe(Observation(NOW, BatchShape(prefill_tokens=1000), 0.1, 0.1))
    free = interactive(0, target=500, next_due_s=1.0, importance=0.5)
    paid = [interactive(i, target=9000, next_due_s=1.0 + i / 64, importance=1.0) for i in (1, 2)]
    assert list(policy.plan(view([free, *paid]))[0].relegate) == []


# ---------------------------------------------------------------- selective preemption, switches


def test_a_prefill_begun_is_overtaken_only_while_that_does_not_make_it_late() -> None:
    policy = qoserve(hybrid=False)
    # 10,000 tokens/s; an iteration of 2,500 tokens takes 0.25 s
    policy.observe(Observation(NOW, BatchShape(prefill_tokens=1000), 0.1, 0.1))

    def first(due_s: float) -> int:
        begun = summary(0, phase=Phase.PREFILL, target=3000, computed=1000, ttlt_s=due_s)
        return prefill_order(policy, [begun, interactive(1, target=3000, next_due_s=0.4)])[0]

    assert first(600.0) == 1
    assert first(0.44) == 0


def test_all_switches_off_is_edf() -> None:
    made = [decode(interactive(i)) for i in range(20)]
    made += [interactive(100 + i, target=100 * i, arrived_s=-i % 5) for i in range(1, 9)]
    off = qoserve(dynamic_chunking=False, eager_relegation=False, hybrid=False).plan(view(made))[0]
    assert entries(off) == entries(registry.make("edf").plan(view(made))[0])


# ---------------------------------------------------------------- what is learned


def test_history_makes_the_application_with_long_outputs_wait_for_the_short_one() -> None:
    policy = qoserve(alpha_low_s=0.01, alpha_high_s=0.01)
    pair = [summary(0, application=0, max_tokens=4000), summary(1, application=1, max_tokens=4000)]
    assert prefill_order(policy, pair) == [0, 1]
    ended = [Ended("a", 10, 4000, 2000) for _ in range(10)] + [
        Ended("b", 10, 4000, 20) for _ in range(10)
    ]
    policy.observe(Observation(NOW, BatchShape(decodes=10), 0.02, 0.02, ended))
    assert prefill_order(policy, pair) == [1, 0]
