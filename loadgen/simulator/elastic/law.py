"""Laws of scaling, as a simulated fleet asks them: how many replicas are wanted now?"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from shared.core.scaling.scaling import MAY_MISS, ScalingCore
from shared.core.scaling.tally import ArrivalTally
from shared.schemas import Announce, Digest, Ended, Record
from shared.vocabulary import ReplicaId

WARM_UP_S = 120.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """The fleet at the instant that a law is asked. `starting`: replicas that warm up."""

    now_s: float
    serving: list[Digest]
    starting: int


class Law(Protocol):
    """It hears what happens to requests; then it is asked every `every_s`."""

    every_s: float
    # those that are to compute prompts only, of the replicas whose role is not fixed
    prefill: Sequence[ReplicaId]

    def announced(self, announce: Announce) -> None:
        """A replica serves."""

    def arrived(self, record: Record) -> None:
        """A request came."""

    def ended(self, record: Record) -> None:
        """A request has ended."""

    def wanted(self, fleet: Fleet) -> int:
        """The replicas that are wanted, those included that serve or warm up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Replicas come and go by a law. One that is started serves after `warm_up_s`; one that leaves
    moves its requests to the others. `law` makes the law of one run.
    """

    law: Callable[[], Law]
    least: int = 1
    most: int = 16
    warm_up_s: float = WARM_UP_S


class OurLaw:
    """Ours: the forecast that a live fleet makes (shared/core/scaling), by messages of a second."""

    every_s = 1.0

    def __init__(self, warm_up_s: float, may_miss: float = MAY_MISS) -> None:
        self.core = ScalingCore(warm_up_s, 0.0, may_miss)
        self.prefill: Sequence[ReplicaId] = ()
        self._tally = ArrivalTally(lambda _: "")

    def announced(self, announce: Announce) -> None:
        self.core.announced(announce)

    def arrived(self, record: Record) -> None:
        self._tally.add(record)

    def ended(self, record: Record) -> None:
        assert record.verdict is not None
        ended = Ended(tier=record.tier, verdict=record.verdict)
        self.core.ended(ended, record.verdict.ended_unix_s)

    def wanted(self, fleet: Fleet) -> int:
        for work in self._tally.take():
            self.core.arrived(work, fleet.now_s)
        for digest in fleet.serving:
            self.core.heard(digest, fleet.now_s)
        needed = self.core.needed("", fleet.now_s)
        self.prefill = needed.prefill
        return needed.replicas


def of_roles(replicas: int) -> Scaling:
    """So many replicas, whose roles change as ours asks."""
    return Scaling(law=partial(OurLaw, WARM_UP_S), least=replicas, most=replicas)
