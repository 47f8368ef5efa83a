"""The figures of a simulated run, as the `simulate` command prints them."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import UNSET, Struct, UnsetType
from numpy.typing import NDArray

from loadgen.load.mix import PlannedRequest
from loadgen.load.session import Sessions, sessions
from loadgen.simulator.simulation import SimulationResult
from loadgen.trials.trial import Trial
from shared.core.record.verdict import GOOD_ENDS
from shared.perf.draft import DraftCost
from shared.schemas import Verdict
from shared.vocabulary import Missed

# QoServe section 4.2: a request is long if its prompt is at or beyond this percentile of the
# workload's
LONG_PERCENTILE = 90

Values = NDArray[np.float64] | NDArray[np.float32]
Mask = NDArray[np.bool_]
TokenTimes = Sequence[Sequence[float]]  # for each request, the instants of its tokens, ascending


class Percentiles(Struct, frozen=True, kw_only=True):
    """Percentiles in seconds, linear between values; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None

    @staticmethod
    def of(values: Values) -> "Percentiles":
        """`values` may be reordered."""
        if not len(values):
            return Percentiles(p50=None, p95=None, p99=None)
        p50, p95, p99 = np.percentile(values, (50, 95, 99), overwrite_input=True).tolist()
        return Percentiles(p50=p50, p95=p95, p99=p99)


class Violations(Struct, frozen=True, kw_only=True):
    """Requests whose SLO was missed, by the first bound broken; `tbt`: as the definition judges."""

    unfinished: int
    ttft: int
    tbt: int
    ttlt: int


class Group(Struct, frozen=True, kw_only=True):
    """The figures of a group of requests. `violated`: the SLO was not met, for whatever reason, an
    end that never came included.

    `ttft_s`: of the requests that ended with at least one token; `tbt_s`: every gap between two
    tokens of one request, None where token times were not kept; `ttlt_s`: of finished requests.
    """

    offered: int
    violated: int
    violated_fraction: float  # 0 where nothing was offered
    violations: Violations
    ttft_s: Percentiles
    tbt_s: Percentiles
    ttlt_s: Percentiles


class Figures(Struct, frozen=True, kw_only=True):
    """The output of `slackline simulate --json`. `rate_rps` is the rate asked for, or else the
    requests offered over `duration_s`.

    `workload` names the workload or trace that lengths are from, `tiers` the set. `draft` and
    `acceptance` describe the draft model that policies could use: `drafted` tokens were verified
    and `accepted` of them kept, in `verifications` of one request each.
    """

    policy: str
    settings: dict[str, str]  # as given for the policy
    profile: str
    replicas: int
    workload: str
    tiers: str
    rate_rps: float
    duration_s: float
    seed: int
    definition: str
    latency: str
    offered: int
    finished: int
    violated: int
    violated_fraction: float
    by_tier: dict[str, Group]
    by_importance: dict[str, Group]
    by_length: dict[str, Group]
    by_session: Sessions | None = None  # None where no request follows another
    relegated: int
    preempted: int
    offloaded: int
    goodput_rps: float
    iterations: int
    tokens: int
    busy_fraction: float
    idle_s: float
    simulated_s: float
    wall_s: float
    requests_per_wall_s: float
    # these have defaults, since results of runs without drafts were stored without them
    draft: DraftCost = 0.0
    acceptance: float = 0.0
    drafted: int = 0
    accepted: int = 0
    verifications: int = 0
    # output tokens of requests whose SLO was met ([adaserve] section 6.1)
    goodput_tokens_per_s: float = 0.0
    by_model: dict[str, Group] | UnsetType = UNSET  # where there are several
    # of the prompt tokens of requests that ended, found in a prefix cache; where prompts share any
    cached_fraction: float | UnsetType = UNSET
    roles: list[str] | UnsetType = UNSET  # as given for the replicas; where KV moves
    link_gbit_s: float | UnsetType = UNSET


def figures_of(
    trial: Trial, requests: Sequence[PlannedRequest], result: SimulationResult
) -> Figures:
    """The figures of a run. Rates are over `duration_s`, the length of the offered load."""
    by, verdicts = trial.deployment, result.verdicts
    broke = np.array([Missed.END if v is None else v.missed for v in verdicts])
    met, offered = broke == Missed.NOTHING, len(requests)
    met_count = int(met.sum())
    measured = _Measured(result, broke)
    long, replicas = long_prompts(requests), sum(model.replicas for model in by.served)
    return Figures(
        policy=by.policy,
        settings=dict(by.settings),
        profile=", ".join(model.profile for model in by.served),
        replicas=replicas,
        workload=trial.workload,
        tiers=trial.tiers.name,
        rate_rps=offered / trial.duration_s if trial.rate_rps is None else trial.rate_rps,
        duration_s=trial.duration_s,
        seed=trial.seed,
        definition=trial.tiers.definition,
        latency=by.latency.name,
        offered=offered,
        finished=sum(_finished(v) for v in verdicts),
        violated=offered - met_count,
        violated_fraction=(offered - met_count) / offered,
        by_tier=measured.groups([r.tier for r in requests]),
        by_importance=measured.groups([f"{r.importance:g}" for r in requests]),
        by_length={"short": measured.group(~long), "long": measured.group(long)},
        by_session=sessions(requests, ~met),
        relegated=result.relegated,
        preempted=result.preempted,
        offloaded=result.offloaded,
        goodput_rps=met_count / trial.duration_s,
        iterations=result.iterations,
        tokens=result.tokens,
        busy_fraction=result.busy_s / max(result.simulated_s * replicas, 1e-9),
        idle_s=result.idle_s,
        simulated_s=result.simulated_s,
        wall_s=result.wall_s,
        requests_per_wall_s=offered / result.wall_s,
        draft=by.draft,
        acceptance=by.acceptance,
        drafted=result.drafted,
        accepted=result.accepted,
        verifications=result.verifications,
        goodput_tokens_per_s=_tokens(verdicts, met) / trial.duration_s,
        by_model=measured.groups([r.model for r in requests]) if by.models else UNSET,
        cached_fraction=_cached(verdicts) if any(r.pieces for r in requests) else UNSET,
        roles=list(by.roles) if by.link_gbit_s else UNSET,
        link_gbit_s=by.link_gbit_s or UNSET,
    )


class _Measured:
    """The measurements of a run, in arrays along its requests, of which any group is summarised."""

    def __init__(self, result: SimulationResult, broke: NDArray[np.str_]) -> None:
        verdicts, times = result.verdicts, result.token_unix_s
        self._broke = broke
        self._ttft_s = np.array(
            [np.nan if v is None or v.ttft_s is None else v.ttft_s for v in verdicts]
        )
        self._ttlt_s = np.array(
            [
                v.ttlt_s if v is not None and _finished(v) and v.ttlt_s is not None else np.nan
                for v in verdicts
            ]
        )
        # every gap, request after request, and how many each request has
        self._gaps_s, self._gaps = np.empty(0, np.float32), np.zeros(len(verdicts), np.int64)
        if times is not None:
            self._gaps_s, self._gaps = token_gaps_s(times)

    def group(self, members: Mask) -> Group:
        offered = int(members.sum())
        kinds = Counter(self._broke[members].tolist())
        violated = offered - kinds[Missed.NOTHING]
        return Group(
            offered=offered,
            violated=violated,
            violated_fraction=violated / max(1, offered),
            violations=Violations(
                unfinished=kinds[Missed.END],
                ttft=kinds[Missed.TTFT],
                tbt=kinds[Missed.TBT],
                ttlt=kinds[Missed.TTLT],
            ),
            ttft_s=Percentiles.of(_known(self._ttft_s[members])),
            tbt_s=Percentiles.of(self._gaps_s[np.repeat(members, self._gaps)]),
            ttlt_s=Percentiles.of(_known(self._ttlt_s[members])),
        )

    def groups(self, names: Sequence[str]) -> dict[str, Group]:
        """A group for each name; `names` runs along the requests."""
        each = np.array(names)
        return {name: self.group(each == name) for name in sorted(set(names))}


def long_prompts(requests: Sequence[PlannedRequest]) -> Mask:
    """[requests] whether each is long by QoServe section 4.2."""
    prompt_tokens = np.array([request.prompt_tokens for request in requests])
    long: Mask = prompt_tokens >= np.percentile(prompt_tokens, LONG_PERCENTILE)
    return long


def token_gaps_s(
    token_unix_s: TokenTimes, block: int = 1024
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Every gap between two tokens of one request, request after request; and [requests] the number
    of gaps of each.

    Single precision holds them to a part in ten million, in half the memory. `block`: requests
    worked on at once.
    """
    tokens = np.array([len(times) for times in token_unix_s], dtype=np.int64)
    gaps = np.maximum(tokens - 1, 0)
    gaps_s, filled = np.empty(int(gaps.sum()), dtype=np.float32), 0
    for begin in range(0, len(tokens), block):
        counts = tokens[begin : begin + block]
        at_s = np.concatenate(
            [np.asarray(times, dtype=np.float64) for times in token_unix_s[begin : begin + block]]
        )
        first = np.zeros(len(at_s), dtype=bool)
        first[(np.cumsum(counts) - counts)[counts > 0]] = True
        found_s = np.diff(at_s)[~first[1:]]
        gaps_s[filled : filled + len(found_s)] = found_s
        filled += len(found_s)
    return gaps_s, gaps


def _finished(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.finish_reason in GOOD_ENDS


def _tokens(verdicts: Sequence[Verdict | None], met: Mask) -> int:
    """The output tokens of the requests whose SLO was met."""
    return sum(v.output_tokens for v, kept in zip(verdicts, met, strict=True) if v and kept)


def _cached(verdicts: Sequence[Verdict | None]) -> float:
    """The fraction of the prompt tokens that were found in a prefix cache."""
    ended = [v for v in verdicts if v is not None]
    return sum(v.cached_tokens for v in ended) / max(1, sum(v.prompt_tokens for v in ended))


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[~np.isnan(values)]
