"""A simulated run in loadgen's terms: its outcomes as a client would have seen them, and the figures of the `simulate` command."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from loadgen.mix import PlannedRequest
from loadgen.report import Spread, spread
from loadgen.tally import Outcome, Tally
from shared.drive.virtual import SimulationResult
from shared.policy.verdict import GOOD_ENDS
from shared.schemas import Verdict
from shared.tiers import TierSet

LONG_PERCENTILE = 90  # QoServe section 4: a request is long if its prompt is beyond this percentile of the workload's


class Percentiles(Struct, frozen=True, kw_only=True):
    """Seconds; None where nothing was measured."""

    p50: float | None
    p99: float | None

    @staticmethod
    def of(values: Spread) -> "Percentiles":
        return Percentiles(p50=values.p50_s, p99=values.p99_s)


class Group(Struct, frozen=True, kw_only=True):
    """Of these requests. `violated`: the SLO was not met, for whatever reason, an end that never came included."""

    offered: int
    violated_fraction: float
    ttft_s: Percentiles
    tbt_s: Percentiles
    ttlt_s: Percentiles


class Figures(Struct, frozen=True, kw_only=True):
    """What `slackline simulate --json` prints."""

    policy: str
    profile: str
    replicas: int
    rate_rps: float
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
    relegated: int
    preempted: int
    goodput_rps: float
    iterations: int
    tokens: int
    busy_fraction: float
    idle_s: float
    simulated_s: float
    wall_s: float
    requests_per_wall_s: float


def figures(
    requests: Sequence[PlannedRequest],
    result: SimulationResult,
    *,
    policy: str,
    profile: str,
    replicas: int,
    seed: int,
    latency: str,
    duration_s: float,
) -> Figures:
    """`result` must hold token times. Rates are over `duration_s`, the length of the offered load."""
    times = result.token_unix_s
    assert times is not None
    verdicts = result.verdicts
    met = sum(v is not None and v.slo_met for v in verdicts)

    def group(numbers: list[int]) -> Group:
        of = [v for n in numbers if (v := verdicts[n]) is not None]
        gaps_s = [np.diff(np.asarray(times[n])) for n in numbers]
        return Group(
            offered=len(numbers),
            violated_fraction=1 - sum(v.slo_met for v in of) / len(numbers),
            ttft_s=Percentiles.of(spread([v.ttft_s for v in of if v.ttft_s is not None])),
            tbt_s=Percentiles.of(spread(np.concatenate(gaps_s) if gaps_s else [])),
            ttlt_s=Percentiles.of(spread([v.ttlt_s for v in of if v.ttlt_s is not None and v.finish_reason in GOOD_ENDS])),
        )

    def groups(names: Sequence[str]) -> dict[str, Group]:
        members: dict[str, list[int]] = {name: [] for name in sorted(set(names))}
        for number, name in enumerate(names):
            members[name].append(number)
        return {name: group(numbers) for name, numbers in members.items()}

    long_tokens = np.percentile([r.prompt_tokens for r in requests], LONG_PERCENTILE)
    return Figures(
        policy=policy,
        profile=profile,
        replicas=replicas,
        rate_rps=len(requests) / duration_s,
        seed=seed,
        definition="deadline",
        latency=latency,
        offered=len(requests),
        finished=sum(_finished(v) for v in verdicts),
        violated=len(requests) - met,
        violated_fraction=1 - met / len(requests),
        by_tier=groups([r.tier for r in requests]),
        by_importance=groups([f"{r.importance:g}" for r in requests]),
        by_length=groups(["long" if r.prompt_tokens > long_tokens else "short" for r in requests]),
        relegated=result.relegated,
        preempted=result.preempted,
        goodput_rps=met / duration_s,
        iterations=result.iterations,
        tokens=result.tokens,
        busy_fraction=result.busy_s / max(result.simulated_s * replicas, 1e-9),
        idle_s=result.idle_s,
        simulated_s=result.simulated_s,
        wall_s=result.wall_s,
        requests_per_wall_s=len(requests) / result.wall_s,
    )


def tally(requests: Sequence[PlannedRequest], result: SimulationResult, tiers: TierSet) -> Tally:
    """The run as `slackline load` would have counted it, clients without any network of their own."""
    times = result.token_unix_s
    assert times is not None
    made = Tally(tiers)
    for planned, verdict, token_unix_s in zip(requests, result.verdicts, times, strict=True):
        outcome: Outcome = made.begin(planned, planned.arrival_s, 0.0)
        for at_unix_s in token_unix_s:
            outcome.emit(1, at_unix_s)
        if verdict is None:
            outcome.end("unfinished")
        else:
            outcome.server_met, outcome.relegated = verdict.slo_met, verdict.relegated
            outcome.end(verdict.finish_reason, verdict.message)
    return made


def _finished(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.finish_reason in GOOD_ENDS
