"""Tests of the share of drafts accepted, as a worker learns it and a policy begins with it."""

from random import Random

import numpy as np
import pytest

from shared.core.worker.draft_yields import (
    APPLICATIONS,
    FADE,
    OTHERS,
    POSITIONS,
    DraftYields,
    merged,
)
from shared.perf.shape import BatchShape
from shared.policy.seam import Drafts, Observation
from shared.policy.slackline.drafts import Accepted
from shared.policy.slos_serve.draft_length import Acceptance


@pytest.mark.parametrize("seed", range(5))
def test_each_position_has_its_share_of_those_that_were_reached(seed: int) -> None:
    """Two applications with acceptances of their own, chains of any length."""
    rng, yields = Random(seed), DraftYields()
    law = {"chat": [0.9, 0.6, 0.8, 0.3], "code": [0.5, 0.5, 0.95, 0.7]}
    for _ in range(20_000):
        application = rng.choice(list(law))
        drafted = rng.randint(1, 4)
        accepted = 0
        while accepted < drafted and rng.random() < law[application][accepted]:
            accepted += 1
        yields.observe(application, drafted, accepted)
    by_name = {row.application: row for row in yields.rows()}
    for application, shares in law.items():
        assert by_name[application].accepted == pytest.approx(shares, abs=0.12)
        assert FADE / 2 <= by_name[application].verifications <= FADE
    both = merged(yields.rows())
    assert all(
        min(pair) - 0.12 <= share <= max(pair) + 0.12
        for share, *pair in zip(both, *law.values(), strict=True)
    )


def test_names_that_clients_choose_do_not_make_it_grow() -> None:
    yields = DraftYields()
    for n in range(1000):
        yields.observe(f"app {n}", 20, 20)
    rows = yields.rows()
    assert len(rows) == APPLICATIONS + 1 and rows[-1].application == OTHERS
    assert all(row.accepted == [1.0] * POSITIONS for row in rows)
    assert sum(row.verifications for row in rows) == 1000
    assert merged([]) == ()


def drafts(drafted: int, accepted: int) -> Drafts:
    one = np.ones(1, dtype=np.int32)
    return Drafts(np.array([0.1]), 0 * one, drafted * one, accepted * one)


def test_a_policy_that_begins_on_a_replica_begins_with_what_its_worker_has_seen() -> None:
    """A planner that takes over has observed nothing; what it then observes itself counts."""
    slackline, slos_serve = Accepted(), Acceptance()
    assert (slackline.scale, slos_serve.alpha) == (1.0, 0.7)
    for learner in (slackline, slos_serve):
        learner.begin(())
    assert (slackline.scale, slos_serve.alpha) == (1.0, 0.7)
    for learner in (slackline, slos_serve):
        learner.begin((0.35, 0.25))
    assert slackline.scale == pytest.approx(0.5) and slos_serve.alpha == pytest.approx(0.3)
    for _ in range(500):
        slackline.observe(Observation(0.0, BatchShape(), 0.0, 0.0, drafts=drafts(3, 3)))
        slos_serve.observe(drafts(3, 3))
    for learner in (slackline, slos_serve):
        learner.begin((0.35, 0.25))
    assert slackline.scale > 1.0 and slos_serve.alpha > 0.9
