"""Tests of a batch's record: which steps its status may take until it ends, and no further."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.gateway.batches import record as batch_record
from services.gateway.batches.record import BatchRecord, LineError
from shared.errors import PeerError

NEW = BatchRecord(
    id="batch_1",
    tenant="acme",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=1,
    expires_at=86_401,
    output_keep_s=3600,
)
STEPS = {
    "begun": lambda r: batch_record.begun(r, 3, 2),
    "failed": lambda r: batch_record.failed(r, [LineError(code="x", message="y")], 2),
    "cancelled": lambda r: batch_record.cancelled(r, 2),
    "counted": lambda r: batch_record.counted(r, 1, 1),
    "block": lambda r: batch_record.block_begun(r, 0, 60.0),
    "finalizing": lambda r: batch_record.finalizing(
        r, "cancelled" if r.status == "cancelling" else "completed", 2
    ),
    "ended": lambda r: batch_record.ended(r, "file-a", None, 2),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_an_ended_batch_changes_no_more_and_says_when_it_ended(steps: list[str]) -> None:
    record = NEW
    for step in steps:
        try:
            after = STEPS[step](record)
        except PeerError:
            continue
        if after is not None:
            assert record.open
            record = after
    shown = batch_record.shown(record)
    assert shown.status == record.status
    if not record.open:
        assert getattr(record, f"{record.status}_at") == 2


def test_a_batch_that_is_cancelled_before_its_first_line_is_over() -> None:
    record = batch_record.cancelled(NEW, 2)
    assert record is not None
    assert (record.status, record.open) == ("cancelled", False)


@pytest.mark.parametrize("status", ["finalizing", "completed", "failed", "expired"])
def test_it_may_be_too_late_to_cancel(status: str) -> None:
    with pytest.raises(PeerError):
        batch_record.cancelled(replace(NEW, status=status), 2)
