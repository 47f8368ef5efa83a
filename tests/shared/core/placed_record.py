"""Places the record of a request with a replica, for tests."""

from shared.core.record import record as life
from shared.schemas import Record
from shared.vocabulary import ReplicaId


def placed(record: Record, replica: ReplicaId, incarnation: str) -> Record:
    """The record once its owner has named this replica."""
    at = life.placed(record, record.owner, replica, incarnation, attempt=record.attempt)
    assert at is not None
    return at
