"""One simulated run: all that decides it but its requests; and how it is run and judged."""

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from loadgen.lab.figures import Figures, figures
from loadgen.load.definition import DEADLINE, Missed, missed, needs_token_times
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.latency import Latency
from loadgen.simulator.simulation import ACCEPTANCE, DRAFT, ReplicaFacts, SimulationResult, simulate
from shared.schemas import Verdict
from shared.tiers import TierSet
from shared.vocabulary import Slo

LATENCIES = {"none": Latency.none, "live": Latency.live}


class Trial(Struct, frozen=True, kw_only=True):
    """A value: it may travel to another process. `rate_rps` None: as recorded; `wait_s` None: until
    all requests have ended.
    """

    policy: str
    settings: Mapping[str, str]
    profile: str
    replicas: int
    workload: str
    tiers: TierSet
    latency: str
    definition: str
    seed: int
    duration_s: float
    rate_rps: float | None
    context_tokens: int
    wait_s: float | None = None
    draft: float = DRAFT
    acceptance: float = ACCEPTANCE
    max_slots: int = ReplicaFacts().max_slots
    hand_back: bool = True

    def serve(
        self,
        requests: Sequence[PlannedRequest],
        *,
        keep_times: bool = True,
        check_every: int = 0,
        most_missed: int | None = None,
        progress: Callable[[float, int], None] | None = None,
    ) -> SimulationResult:
        """Token times are kept if wished, or if the definition needs them. `most_missed` is of
        requests that ended, by the definition.

        Raises ConfigError for a request that no replica can hold.
        """
        return simulate(
            requests,
            self.policy,
            self.settings,
            self.profile,
            self.replicas,
            self.tiers,
            LATENCIES[self.latency](),
            self.seed,
            draft=self.draft,
            acceptance=self.acceptance,
            facts=ReplicaFacts(context_tokens=self.context_tokens, max_slots=self.max_slots),
            hand_back=self.hand_back,
            keep_times=keep_times or needs_token_times(self.definition),
            check_every=check_every,
            most_missed=most_missed,
            misses=None if most_missed is None or self.definition == DEADLINE else self._misses,
            horizon_s=requests[-1].arrival_s + self.wait_s if self.wait_s is not None else None,
            progress=progress,
        )

    def _misses(self, verdict: Verdict, slo: Slo, token_unix_s: Sequence[float]) -> bool:
        return bool(missed(self.definition, [verdict], [slo], [token_unix_s])[0] != Missed.NOTHING)

    def judge(self, requests: Sequence[PlannedRequest], result: SimulationResult) -> Figures:
        return figures(
            requests,
            result,
            policy=self.policy,
            settings=self.settings,
            profile=self.profile,
            replicas=self.replicas,
            seed=self.seed,
            latency=self.latency,
            duration_s=self.duration_s,
            definition=self.definition,
            rate_rps=self.rate_rps,
            workload=self.workload,
            tiers=self.tiers.name,
            draft=self.draft,
            acceptance=self.acceptance,
        )
