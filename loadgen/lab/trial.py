"""One simulated run, its requests apart: what decides it and how it is judged."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from loadgen.load.definition import DEADLINE, Missed, missed, needs_token_times
from loadgen.load.mix import PlannedRequest
from loadgen.load.session import has_rounds
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.schemas import Verdict
from shared.tiers import TierSet
from shared.vocabulary import Slo


class Trial(Struct, frozen=True, kw_only=True):
    """A deployment, the origin of its load, and how SLOs are judged. A value: it may travel to
    another process. `workload` names the workload or trace that lengths are from.
    """

    deployment: Deployment
    tiers: TierSet
    workload: str = ""
    rate_rps: float | None = None  # None: as recorded
    duration_s: float  # of the offered load
    seed: int
    definition: str = DEADLINE
    wait_s: float | None = None  # after the last arrival; None: until all requests have ended

    def serve(
        self,
        requests: Sequence[PlannedRequest],
        *,
        keep_times: bool = True,
        check_every: int = 0,
        most_missed: int | None = None,
        progress: Callable[[float, int], None] | None = None,
    ) -> SimulationResult:
        """Token times are kept if asked for, or if the definition needs them. `most_missed` counts
        requests that ended, judged by the definition.

        Raises ConfigError for a request that no replica can hold.
        """
        options = RunOptions(
            keep_times=keep_times or needs_token_times(self.definition),
            check_every=check_every,
            horizon_s=requests[-1].arrival_s + self.wait_s if self.wait_s is not None else None,
            most_missed=most_missed,
            misses=None if most_missed is None or self.definition == DEADLINE else self._misses,
            progress=progress,
        )
        return simulate(Traffic(requests, self.tiers, self.seed), self.deployment, options)

    def _misses(self, verdict: Verdict, slo: Slo, token_unix_s: Sequence[float]) -> bool:
        return bool(missed(self.definition, [verdict], [slo], [token_unix_s])[0] != Missed.NOTHING)


def most_missed(requests: Sequence[PlannedRequest], violations: float) -> int | None:
    """The number of these requests that may miss their SLO before more than the fraction
    `violations` have. None for sessions of rounds: only the end of the run shows which of them are
    violated.
    """
    return None if has_rounds(requests) else int(violations * len(requests) + 1e-9)
