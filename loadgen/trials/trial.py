"""One simulated run: all that the run needs but its requests, which `serve` is given."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from loadgen.load.mix import PlannedRequest
from loadgen.load.session import has_rounds
from loadgen.simulator.deployment import Deployment
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.rules.tiers import TierSet


class Trial(Struct, frozen=True, kw_only=True):
    """A deployment, and the origin of its load. A value: it may travel to another process.
    `workload` names the workload or trace that lengths are from.
    """

    deployment: Deployment
    tiers: TierSet
    workload: str = ""
    rate_rps: float | None = None  # None: as recorded
    duration_s: float  # of the offered load
    seed: int
    wait_s: float | None = None  # after the last arrival; None: until all requests have ended

    def serve(
        self,
        requests: Sequence[PlannedRequest],
        *,
        keep_times: bool = True,
        check_every: int = 0,
        most_missed: int | None = None,
        accounts: bool = False,
        progress: Callable[[float, int], None] | None = None,
    ) -> SimulationResult:
        """`most_missed`: the run stops once more of the requests that ended missed their SLO.

        Raises ConfigError for a request that no replica can hold.
        """
        options = RunOptions(
            keep_times=keep_times,
            check_every=check_every,
            horizon_s=requests[-1].arrival_s + self.wait_s if self.wait_s is not None else None,
            most_missed=most_missed,
            accounts=accounts,
            progress=progress,
        )
        return simulate(Traffic(requests, self.tiers, self.seed), self.deployment, options)


def most_missed(requests: Sequence[PlannedRequest], violations: float) -> int | None:
    """The number of these requests that may miss their SLO before more than the fraction
    `violations` have. None for sessions of rounds: only the end of the run shows which of them are
    violated.
    """
    return None if has_rounds(requests) else int(violations * len(requests) + 1e-9)
