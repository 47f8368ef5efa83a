"""Slackline: whole answers that give way, and what comes after many of them had to."""

from dataclasses import replace as replaced
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.policy.seam import Ended, Observation, Policy
from shared.policy.slackline.forecast import favoured, give_way, look_again
from shared.policy.slackline.given_up import FADES_S, GivenUp
from shared.policy.slackline.token_order import MARGIN_S
from shared.vocabulary import Slo
from tests.shared.policy.slackline.test_slackline import NO_PASSES, jobs, work
from tests.shared.policy.slos_serve.slos_serving import offer
from tests.shared.policy.views import NOW, Row, decode, interactive, view


@given(jobs=jobs, later=st.lists(st.integers(0, 30), min_size=7, max_size=7))
def test_as_many_as_can_stay_by_later_due_times_and_nobody_is_late_for_them(
    jobs: list[tuple[int, int]], later: list[int]
) -> None:
    """Against every subset. A batch has a margin after it."""
    items = [(float(due), float(seconds), 1.0) for due, seconds in jobs]
    lost = give_way(work(*items), favoured(work(*items)), NO_PASSES)
    due_s = [due for due, _, _ in items]
    for i in np.flatnonzero(lost).tolist():
        due_s[i] += later[i]

    def in_time(some: tuple[int, ...]) -> bool:
        end_s = 0.0
        for i in sorted(some, key=lambda i: due_s[i]):
            end_s += items[i][1]
            if end_s + MARGIN_S > due_s[i]:
                return False
        return True

    still = look_again(work(*items), lost, lost, np.array(due_s)[lost], NO_PASSES)
    assert not (still & ~lost).any()
    stay = tuple(np.flatnonzero(~still).tolist())
    assert in_time(stay)
    kept, gone = np.flatnonzero(~lost).tolist(), np.flatnonzero(lost).tolist()
    more = len(stay) - len(kept) + 1
    assert not any(in_time((*kept, *some)) for some in combinations(gone, more))


@given(jobs=jobs, others=jobs, later=st.integers(0, 30))
def test_nobody_gives_way_for_what_is_looked_at_again(
    jobs: list[tuple[int, int]], others: list[tuple[int, int]], later: int
) -> None:
    """Nor does anything stay that is not looked at again."""
    items = [(float(due), float(seconds), 2.0) for due, seconds in jobs]
    items += [(float(due), float(seconds), 1.0) for due, seconds in others]
    lost = give_way(work(*items), favoured(work(*items)), NO_PASSES)
    again = lost & (np.arange(len(items)) % 2 == 0)
    due_s = work(*items).due_s[again] + later
    still = look_again(work(*items), lost, again, due_s, NO_PASSES)
    assert (still[~again] == lost[~again]).all()


def policy_of(*output_tokens: int) -> Policy:
    """The policy after requests with so many tokens, at 20 ms each."""
    policy = registry.make("slackline")
    shape = BatchShape(decodes=1)
    for _ in range(10):
        ended = [Ended("a", 100, 500, tokens) for tokens in output_tokens]
        policy.observe(Observation(NOW, shape, 0.02, 0.02, ended, iterations=1000))
    return policy


def order(policy: Policy, *rows: Row) -> list[int]:
    """The slots of the prefills that run, in their order."""
    [choice] = policy.plan(view(rows))
    return [int(slot) for slot in choice.slots]


def test_a_whole_answer_keeps_its_turn_while_there_is_time_for_an_output_of_the_mean() -> None:
    """Nine outputs of ten have 20 tokens, and one has 500: 68 in the mean, which take 1.6 s."""
    policy = policy_of(*[20] * 9, 500)
    patient = Row(slot=1, target=2000, ttlt_s=600.0)
    assert order(policy, Row(slot=2, target=2000, arrived_s=-16.0, ttlt_s=20.0), patient)[0] == 2
    assert order(policy, Row(slot=3, target=2000, arrived_s=-19.0, ttlt_s=20.0), patient)[0] == 1


@pytest.mark.parametrize("lost", [0, 8])
def test_once_many_whole_answers_were_given_up_long_prompts_with_a_ttft_go_back(lost: int) -> None:
    """By 8 ms for each token, and so behind a short whole answer. The more important do not."""
    policy = policy_of(20)
    policy.admit(view([]), [offer(n, slo=Slo(ttlt_s=20.0)) for n in range(50)])
    hopeless = [
        Row(slot=n, target=2000, arrived_s=-19.95, ttlt_s=20.0) for n in range(10, 10 + lost)
    ]
    [choice] = policy.plan(view([decode(interactive(1)), *hopeless]))
    assert len(choice.relegate) == lost
    answer = Row(slot=2, target=500, ttlt_s=20.0, arrived_s=-18.0)
    chat = interactive(3, target=2000, arrived_s=-5.0)
    burden = [Row(slot=n, target=20_000, ttlt_s=20.0) for n in (4, 5)]
    assert order(policy, answer, chat, *burden)[0] == (2 if lost else 3)
    assert order(policy, answer, replaced(chat, importance=2.0), *burden)[0] == 3


def test_few_of_many_or_less_than_one_are_not_many_and_what_is_past_is_forgotten() -> None:
    given_up = GivenUp()
    given_up.came(100, NOW)
    assert not given_up.many(NOW)
    given_up.gave_up(14, NOW)
    assert not given_up.many(NOW)
    given_up.gave_up(1, NOW)
    assert given_up.many(NOW)
    given_up.came(10, NOW)
    assert not given_up.many(NOW)
    given_up.gave_up(5, NOW)
    assert given_up.many(NOW + FADES_S)
    assert not given_up.many(NOW + 10 * FADES_S)
