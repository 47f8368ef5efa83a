"""Tests of the policy slackline: which requests run in one iteration."""

from dataclasses import replace as replaced

import numpy as np

from shared.perf.shape import BatchShape
from shared.policy import chunk, registry
from shared.policy.seam import Ended, Observation, View
from shared.policy.slackline.bounds import MARGIN_S
from shared.policy.slackline.policy import OWED, SPARING_S
from tests.shared.policy.views import NOW, Row, decode, entries, interactive, shape_of, view


def test_a_prompt_that_would_be_late_beside_the_decodes_runs_alone() -> None:
    decodes = [decode(Row(slot=n, tbt_s=0.2), context=2000) for n in range(40)]
    late = Row(slot=50, target=300, ttft_s=0.04, tbt_s=0.2)
    seen = view([*decodes, late])
    assert list(entries(registry.make("slackline").plan(seen)[0])) == [50]


def test_an_iteration_ends_where_a_prefill_that_it_completes_is_due() -> None:
    decodes = [decode(Row(slot=1, tbt_s=0.4))]
    first = Row(slot=2, target=500, ttft_s=0.1, tbt_s=0.4)
    seen = view([*decodes, first, Row(slot=3, target=6000, ttft_s=60.0, tbt_s=0.4)])
    choice = registry.make("slackline").plan(seen)[0]
    assert entries(choice)[2] == 500
    assert seen.profile.batch_s(shape_of(seen, choice)) <= 0.1


def test_a_decode_that_is_not_due_does_not_make_others_late() -> None:
    """A pass of all takes longer than the first tokens have, and nothing else waits."""
    urgent = [decode(Row(slot=n, tbt_s=0.05), context=2000, generated=1) for n in range(40)]
    patient = [decode(Row(slot=n, tbt_s=0.2), context=2000, generated=1) for n in range(40, 80)]
    seen = view([*urgent, *patient])
    pass_s = seen.profile.batch_s(chunk.decodes_of(seen, np.arange(40)))
    seen.newest_token_unix_s = np.full(80, NOW + pass_s + 2 * MARGIN_S - 0.05)
    seen.first_token_unix_s = seen.newest_token_unix_s
    choice = registry.make("slackline").plan(seen)[0]
    assert set(entries(choice)) == set(range(40))
    # those that sit out are looked at again
    assert choice.repeats == 1


def test_best_effort_requests_do_not_spend_what_a_first_token_has_earned() -> None:
    """By its deadline the decode has two seconds; a prompt may come that is due sooner."""
    running = decode(Row(slot=1, ttft_s=2.0, tbt_s=0.1), generated=1)
    seen = view([running, Row(slot=2, target=60_000, ttft_s=0.1, arrived_s=-9.0, best_effort=True)])
    choice = registry.make("slackline").plan(seen)[0]
    assert entries(choice).keys() == {1, 2}
    # the pace, and its part of the two seconds that it came early
    assert seen.profile.batch_s(shape_of(seen, choice)) <= 0.1 + 2.0 / 400


def test_best_effort_requests_run_where_nothing_else_wants_the_time() -> None:
    idle = view([decode(Row(slot=1, best_effort=True)), Row(slot=2, best_effort=True)])
    assert entries(registry.make("slackline").plan(idle)[0]).keys() == {1, 2}
    busy = view([Row(slot=1, best_effort=True), Row(slot=2, target=60_000, ttft_s=60.0, tbt_s=0.1)])
    assert entries(registry.make("slackline").plan(busy)[0]).keys() == {2}


def test_while_requests_give_way_early_tokens_are_not_spent_on_best_effort_ones() -> None:
    policy = registry.make("slackline")
    running = [decode(interactive(1)), decode(Row(slot=2, best_effort=True))]

    def runs(seen: View) -> set[int]:
        return set(entries(policy.plan(seen)[0]))

    assert runs(view(running)) == {1, 2}
    (lost,) = policy.plan(view([*running, Row(slot=3, target=4000, ttft_s=0.1)]))
    assert list(lost.relegate) == [3]
    assert runs(view(running)) == {1}
    # with nobody else it runs at once, and beside others when none has given way for a while
    assert runs(view(running[1:])) == {2}
    later = view(running)
    later.start_unix_s += SPARING_S
    later.newest_token_unix_s = later.newest_token_unix_s + SPARING_S
    assert runs(later) == {1, 2}


def test_no_choice_is_repeated_while_a_request_waits_that_does_not_run() -> None:
    """Else its turn would come with the next event, however long after it was due or owed."""
    running = [decode(interactive(1), context=1600)]
    # a patient prompt that finds no room in the KV
    whole = Row(slot=3, target=6000, ttlt_s=300.0)
    (choice,) = registry.make("slackline").plan(view([*running, whole], capacity=120))
    assert entries(choice).keys() == {1}
    assert choice.repeats == 1
    # a best-effort prompt, after another request gave way
    policy = registry.make("slackline")
    policy.plan(view([*running, Row(slot=3, target=4000, ttft_s=0.1)]))
    late = Row(slot=2, ttft_s=0.1, arrived_s=-9.0, best_effort=True)
    (choice,) = policy.plan(view([*running, late]))
    assert entries(choice).keys() == {1}
    assert choice.repeats == 1
    # nobody waits
    assert policy.plan(view(running))[0].repeats > 1


def test_a_best_effort_decode_gets_a_token_in_overload() -> None:
    """It waits no longer than a hundred iterations take, however many others there are."""
    policy, step_s = registry.make("slackline"), 0.05
    others = [Row(slot=n, target=60_000, ttft_s=6000.0, tbt_s=0.1) for n in range(2, 9)]
    seen = view([decode(Row(slot=1, best_effort=True)), *others], capacity=100_000)
    shape = BatchShape(decodes=1, decode_context=100)
    policy.observe(Observation(NOW, shape, step_s, step_s))
    waited_s = longest_s = 0.0
    for _ in range(200):
        (choice,) = policy.plan(seen)
        waited_s = 0.0 if 1 in entries(choice) else waited_s + step_s
        longest_s = max(longest_s, waited_s)
        seen.start_unix_s += step_s
    assert 0.5 < longest_s <= step_s / OWED + 2 * step_s


def test_a_best_effort_prefill_that_can_be_in_time_again_is_promoted() -> None:
    late = Row(slot=1, target=4000, ttft_s=0.1, best_effort=True)
    hopeful = Row(slot=2, target=400, ttft_s=2.0, best_effort=True)

    def promoted(*rows: Row) -> list[int]:
        return list(registry.make("slackline").plan(view(rows))[0].promote)

    assert promoted(late, hopeful) == [2]
    assert promoted(late) == []
    # beside this one, which needs two seconds of 2.1
    assert promoted(hopeful, Row(slot=3, target=25_000, ttft_s=2.1)) == []


def test_of_whole_answers_that_may_be_late_the_more_important_run_first() -> None:
    """Their prefills should have ended, and an output of the mean can still be in time. They come
    after one that is in time.
    """
    late = [Row(slot=n, target=2000, arrived_s=-15.3 - n / 20, ttlt_s=20.0) for n in range(3)]
    late[2] = replaced(late[2], importance=2.0)
    new = Row(slot=3, target=2000, ttlt_s=20.0)

    def order(*rows: Row) -> list[int]:
        policy = registry.make("slackline")
        ended = [Ended("a", 100, 500, 200)] * 10
        shape = BatchShape(decodes=1)
        policy.observe(Observation(NOW, shape, 0.02, 0.02, ended, iterations=1000))
        [choice] = policy.plan(view(rows))
        return [int(slot) for slot in choice.slots]

    assert order(*late, new)[0] == 3
    assert order(*late)[0] == 2


def test_patient_requests_leave_the_kv_that_urgent_ones_lately_needed() -> None:
    policy = registry.make("slackline")
    burst = [interactive(n, target=1600) for n in range(20)]  # 2,000 blocks
    policy.plan(view(burst))
    patient = Row(slot=50, target=1600, ttlt_s=6000.0)
    decodes = [decode(Row(slot=n, tbt_s=0.2), context=160) for n in range(60, 70)]
    assert 50 not in entries(policy.plan(view([*decodes, patient], free=1990))[0])
    assert 50 in entries(policy.plan(view([*decodes, patient], free=2110))[0])
    # an urgent one may have it
    assert 51 in entries(policy.plan(view([*decodes, interactive(51)], free=500))[0])
    # so may one that is due soon, though others go before it while its work is a burden
    soon = Row(slot=52, target=16_000, ttlt_s=12.0)
    assert 52 in entries(policy.plan(view([*decodes, soon], free=1990))[0])
    # alone it begins all the same: nothing would come that lets it
    assert 50 in entries(policy.plan(view([patient], free=1990))[0])
