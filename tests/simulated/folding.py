"""Reads an ack log (a worker's reports) for tests: what became of each attempt at a request."""

from collections.abc import Iterable

from shared.schemas import LogEntry
from shared.store.acklog import Stories, fold_in_turns
from shared.vocabulary import ReplicaId


def fold(entries: Iterable[LogEntry], replica: ReplicaId) -> Stories:
    folding = fold_in_turns(entries, replica)
    while True:
        try:
            folding.send(None)
        except StopIteration as end:
            stories: Stories = end.value
            return stories
