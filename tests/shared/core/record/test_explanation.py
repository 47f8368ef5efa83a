"""Tests of the sentence that explains a late request: by how much it was late, and why."""

import pytest
from msgspec.structs import replace

from shared.core.record.explanation import answer, shares
from shared.request_timeline import Account, Cause, RequestTimeline
from shared.schemas import FirstMissed, Resume
from shared.vocabulary import FinishReason, Missed, RecordState, Slo
from tests import made

ENDED = made.verdict(
    finish_reason=FinishReason.LENGTH,
    slo_met=False,
    prompt_tokens=4,
    output_tokens=40,
    ttft_s=0.4,
    worst_tbt_s=0.05,
    mean_tpot_s=0.04,
    ttlt_s=5.0,
    ended_unix_s=5.0,
)
RECORD = made.record(
    state=RecordState.ENDED,
    attempt=1,
    slo=Slo(ttft_s=0.5, tbt_s=0.03),
    prompt_tokens=4,
    max_tokens=40,
    resume=Resume(diary=RequestTimeline(account=Account(until_unix_s=5.0, decodes_s=0.5))),
)


def missed(due_s: float, came_s: float | None) -> str:
    first = FirstMissed(
        token=6, bound=Missed.TBT, due_s=due_s, came_s=came_s, cause=Cause.DECODES, cause_s=0.5
    )
    return answer(replace(RECORD, verdict=replace(ENDED, first_missed=first)))


@pytest.mark.parametrize(
    ("due_s", "came_s", "told"),
    [
        (0.5, 3.742, "late by 3.24 s: its token 6 was due at 0.50 s and came at 3.74 s;"),
        (0.652, 0.656, "late by 4 ms: its token 6 was due at 0.652 s and came at 0.656 s;"),
        (0.6521, 0.6525, "late by 0.4 ms: its token 6 was due at 0.6521 s and came at 0.6525 s;"),
        (0.098, 0.104, "late by 6 ms: its token 6 was due at 98 ms and came at 0.104 s;"),
        (0.0001, 0.0905, "late by 90 ms: its token 6 was due at 0 ms and came at 90 ms;"),
        (0.65, 0.65 + 1e-9, "late: its token 6 was due at 0.65 s and came at 0.65 s;"),
        (0.65, None, "late: its token 6 was due at 0.65 s and never came;"),
    ],
)
def test_it_says_by_how_much_in_as_many_digits_as_that_needs(
    due_s: float, came_s: float | None, told: str
) -> None:
    assert missed(due_s, came_s).startswith(told)


def test_it_names_no_cause_that_took_less_than_instants_are_known_to() -> None:
    """Rounding leaves such a time to a request that ran alone."""
    alone = Account(until_unix_s=4.0, decodes_s=3.0, prefill_s=1.0, beside_s=1.7e-18)
    assert [(share.cause, share.share) for share in shares(alone)] == [
        (Cause.DECODES, 0.75),
        (Cause.PREFILL, 0.25),
    ]
