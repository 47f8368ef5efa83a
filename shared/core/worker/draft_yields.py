"""The share of drafts that the target model accepts, by application and position in the chain. A
worker learns it from its engine's iterations and announces it; a new planner begins with it.
"""

from dataclasses import dataclass, field

from shared.schemas import DraftYield

POSITIONS = 8  # of drafts after the newest token; chains are seldom longer
APPLICATIONS = 16  # with a row of their own; clients choose the names, so the rest share one row
OTHERS = "other"
FADE = 4096  # after so many verifications of an application, its counts are halved


@dataclass(slots=True)
class _Counts:
    tried: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)


class DraftYields:
    """The counts of one worker. A position is tried if all drafts before it were accepted and
    further drafts were verified; in a chain, the next of these is at that position.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def observe(self, application: str, drafted: int, accepted: int) -> None:
        """Count one request of one iteration: it had `drafted` drafts verified, at least one, of
        which `accepted` in line were accepted.
        """
        counts = self._counts.get(application)
        if counts is None:
            if len(self._counts) >= APPLICATIONS:
                application = OTHERS
            counts = self._counts.setdefault(application, _Counts())
        for position in range(min(accepted + 1, drafted, POSITIONS)):
            counts.tried[position] += 1.0
            counts.accepted[position] += position < accepted
        if counts.tried[0] > FADE:
            counts.tried = [n / 2 for n in counts.tried]
            counts.accepted = [n / 2 for n in counts.accepted]

    def rows(self) -> list[DraftYield]:
        """A row for each application, as the worker announces them."""
        return [
            DraftYield(
                application=application,
                verifications=counts.tried[0],
                accepted=[
                    min(accepted / tried, 1.0)
                    for accepted, tried in zip(counts.accepted, counts.tried, strict=True)
                    if tried
                ],
            )
            for application, counts in self._counts.items()
        ]


def merged(rows: list[DraftYield]) -> tuple[float, ...]:
    """The accepted share of all applications together, by position; empty if nothing is known."""
    tried, accepted = [0.0] * POSITIONS, [0.0] * POSITIONS
    for row in rows:
        reached = row.verifications
        for position, share in enumerate(row.accepted[:POSITIONS]):
            tried[position] += reached
            reached *= share
            accepted[position] += reached
    known = [(hits, n) for hits, n in zip(accepted, tried, strict=True) if n]
    return tuple(hits / n for hits, n in known)
