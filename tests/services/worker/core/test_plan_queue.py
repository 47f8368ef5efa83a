"""Tests of a worker's plan queue: which plans it accepts, refuses, or ignores as out of date."""

import pytest
from msgspec.structs import replace

from services.worker.core.plan_queue import PlanQueue
from shared.columns import pack
from shared.schemas import Selection
from shared.vocabulary import ReplicaId
from tests import made

SLOTS = 4
PLAN = made.plan([0, 1], [1, 8], replica=ReplicaId("r"), epoch=2, sync=3, seq=2)
DRAFTS = Selection(method="chain", depth=pack([3, 0]), width=pack([1, 1]), budget_tokens=9)
SHORT = replace(DRAFTS, depth=pack([1]), width=b"")


def queue() -> PlanQueue:
    """A queue that has accepted plan 1 of epoch 2 (the lease), sync 3 (the resync within it)."""
    plans = PlanQueue("i", SLOTS)
    assert plans.resync(2, 3)
    assert plans.accept(replace(PLAN, seq=1)) is None
    return plans


@pytest.mark.parametrize(
    ("changes", "reason", "queued"),
    [
        ({}, None, 2),
        ({"selection": DRAFTS}, None, 2),
        ({"incarnation": "other"}, "another incarnation", 1),
        ({"epoch": 1, "sync": 9}, None, 1),
        ({"sync": 2}, None, 1),
        ({"sync": 4}, "resync first", 1),
        ({"epoch": 3, "sync": 0}, "resync first", 1),
        ({"seq": 1}, None, 1),
        ({"seq": 3}, "a plan is missing", 1),
    ],
)
def test_a_plan_is_queued_refused_or_ignored(
    changes: dict[str, object], reason: str | None, queued: int
) -> None:
    plans = queue()
    refused = plans.accept(replace(PLAN, **changes))
    assert (None if refused is None else refused.reason) == reason
    assert refused is None or (refused.epoch, refused.expected_seq) == (2, 2)
    assert len(plans) == queued


@pytest.mark.parametrize(
    "changes",
    [
        {"caps": pack([1])},
        {"caps": pack([1, 0])},
        {"slots": pack([0, 0])},
        {"slots": pack([0, SLOTS])},
        {"slots": b"123", "caps": b"123"},
        {"preempted": pack([-1])},
        {"released": pack([1])},
        {"selection": SHORT},
        {"selection": replace(DRAFTS, depth=pack([1, 2**31 - 1]))},
        {"selection": replace(DRAFTS, width=pack([1, 2**31 - 1]))},
        {"selection": replace(DRAFTS, depth=pack([1, -1]))},
        {"selection": replace(DRAFTS, method="none such")},
    ],
)  # fmt: skip
def test_a_plan_whose_columns_do_not_fit_is_refused(changes: dict[str, object]) -> None:
    refused = queue().accept(replace(PLAN, **changes))
    assert refused is not None and refused.reason.startswith("columns of different lengths")


def test_a_resync_drops_the_plans_that_have_not_begun_and_no_others() -> None:
    plans = queue()
    begun = plans.begin()
    assert begun is not None and begun.seq == 1
    assert plans.accept(PLAN) is None
    assert not plans.resync(2, 2), "a stale lease"
    assert len(plans) == 1
    assert plans.resync(2, 4)
    assert (len(plans), plans.next_seq) == (0, 2)
    assert plans.begin() is None
