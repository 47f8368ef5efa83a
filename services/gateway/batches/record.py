"""A batch: its record, and the events that change it. Nothing here waits or reads a clock.

    validating -> in_progress -> finalizing -> completed
         |             |              |`----> expired
         |             |              `-----> cancelled
         |             `-> cancelling -> finalizing
         `-> failed, cancelled

While it finalises, `ending` says which of the three it becomes.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from shared.errors import PeerError

ENDED = ("completed", "failed", "expired", "cancelled")
ERRORS_LIMIT = 50  # faults of its file that a batch names
# lines of one block have the same time to their last token, from the instant at which the first of
# them is asked: a request that is asked again must be the same
BLOCK_LINES = 256
Number = Annotated[int, Meta(ge=0, lt=2**53)]


class LineError(Struct, frozen=True, kw_only=True):
    """A fault of the file of a batch, and the line (from 1) that has it."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One batch as it is stored. Instants are in unix seconds."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: Number
    expires_at: Number
    output_keep_s: Number
    status: str = "validating"
    ending: str = ""  # what it becomes
    metadata: dict[str, str] = {}
    in_progress_at: Number | None = None
    finalizing_at: Number | None = None
    completed_at: Number | None = None
    failed_at: Number | None = None
    expired_at: Number | None = None
    cancelling_at: Number | None = None
    cancelled_at: Number | None = None
    total: Number = 0
    completed: Number = 0
    failed: Number = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[LineError] = []
    ttlts_s: list[float] = []  # of each block of lines

    @property
    def open(self) -> bool:
        return self.status not in ENDED

    @property
    def output_chunks(self) -> str:
        """The id that the file of answers gets, if there are any."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def error_chunks(self) -> str:
        return f"file-{self.id.removeprefix('batch_')}-errors"


def begun(record: BatchRecord, lines: int, now: int) -> BatchRecord | None:
    """The batch's file was checked, and every line of it is good."""
    if record.status != "validating":
        return None
    return replace(record, status="in_progress", in_progress_at=now, total=lines)


def failed(record: BatchRecord, errors: list[LineError], now: int) -> BatchRecord | None:
    """The batch's file has faults, or is gone."""
    if not record.open or record.status == "finalizing":
        return None
    return replace(record, status="failed", failed_at=now, errors=errors[:ERRORS_LIMIT])


def cancelled(record: BatchRecord, now: int) -> BatchRecord | None:
    """The tenant cancels the batch. Raises PeerError once it is too late."""
    if record.status == "cancelling":
        return None
    if record.status not in ("validating", "in_progress"):
        raise PeerError(
            f"a batch with the status {record.status} cannot be cancelled", code="conflict"
        )
    if record.status == "validating":  # none of its lines has been asked
        return replace(record, status="cancelled", cancelling_at=now, cancelled_at=now)
    return replace(record, status="cancelling", cancelling_at=now)


def counted(record: BatchRecord, completed: int, failed: int) -> BatchRecord | None:
    """`completed` lines have an answer by now, and `failed` lines an error."""
    if not record.open or (record.completed, record.failed) == (completed, failed):
        return None
    return replace(record, completed=completed, failed=failed)


def block_begun(record: BatchRecord, block: int, ttlt_s: float) -> BatchRecord | None:
    """The first line of a block is about to be asked."""
    if not record.open or block != len(record.ttlts_s):
        return None
    return replace(record, ttlts_s=[*record.ttlts_s, ttlt_s])


def finalizing(record: BatchRecord, ending: str, now: int) -> BatchRecord | None:
    """Every line has its result; the files are made next."""
    if not record.open or record.status == "finalizing":
        return None
    return replace(record, status="finalizing", finalizing_at=now, ending=ending)


def ended(
    record: BatchRecord, output_file_id: str | None, error_file_id: str | None, now: int
) -> BatchRecord | None:
    """The files of the batch's results are stored."""
    if record.status != "finalizing":
        return None
    return replace(
        record,
        status=record.ending,
        output_file_id=output_file_id,
        error_file_id=error_file_id,
        completed_at=now if record.ending == "completed" else None,
        expired_at=now if record.ending == "expired" else None,
        cancelled_at=now if record.ending == "cancelled" else None,
    )


class RequestCounts(Struct, frozen=True, kw_only=True):
    total: int
    completed: int
    failed: int


class LineErrors(Struct, frozen=True, kw_only=True):
    data: list[LineError]
    object: str = "list"


class Batch(Struct, frozen=True, kw_only=True):
    """A batch as OpenAI's API shows it."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: str
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    errors: LineErrors | None
    output_file_id: str | None
    error_file_id: str | None
    metadata: dict[str, str]
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    object: str = "batch"


def shown(record: BatchRecord) -> Batch:
    fields: dict[str, Any] = {
        name: getattr(record, name)
        for name in Batch.__struct_fields__
        if name not in ("request_counts", "errors", "object")
    }
    counts = RequestCounts(total=record.total, completed=record.completed, failed=record.failed)
    errors = LineErrors(data=record.errors) if record.errors else None
    return Batch(**fields, request_counts=counts, errors=errors)
