"""The acceptance of drafts, by application and position, as a worker learns it from what its engine
did.
"""

from dataclasses import dataclass, field

from shared.schemas import DraftYield

POSITIONS = 8  # behind a root; drafts are seldom longer
APPLICATIONS = 16  # named by clients; all others share one row
OTHERS = "other"
FADE = 4096  # verifications of an application, after which its past counts half


@dataclass(slots=True)
class _Counts:
    tried: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * POSITIONS)


class DraftYields:
    """A position counts as tried where all before it were accepted and more drafts were verified:
    in a chain, the next one.
    """

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}

    def observe(self, application: str, drafted: int, accepted: int) -> None:
        """One request verified so many drafts in one iteration, at least one, and accepted those on
        its path.
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

    def told(self) -> list[DraftYield]:
        """The rows that are announced."""
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


def merged(told: list[DraftYield]) -> tuple[float, ...]:
    """The shares of all applications together, by position. Empty: nothing is known."""
    tried, accepted = [0.0] * POSITIONS, [0.0] * POSITIONS
    for of in told:
        reached = of.verifications
        for position, share in enumerate(of.accepted[:POSITIONS]):
            tried[position] += reached
            reached *= share
            accepted[position] += reached
    known = [(hits, n) for hits, n in zip(accepted, tried, strict=True) if n]
    return tuple(hits / n for hits, n in known)
