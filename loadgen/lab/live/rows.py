"""A row of the comparison: a system that served the load once, or several times in turns."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec import Struct

from loadgen.lab.live.iterations import Iteration
from loadgen.lab.live.load import RisingLoad
from loadgen.load.mix import PlannedRequest
from loadgen.markdown import table
from shared.perf.draft import DraftCost, fractions_of


class Attained(Struct, frozen=True, kw_only=True):
    """Fractions of the offered requests that kept their SLO."""

    met: float
    by_tier: dict[str, float]
    by_stage: list[float]
    goodput_tokens_per_s: float  # of the outputs of these requests, per second of arrivals


class Phases(Struct, frozen=True, kw_only=True):
    """The mean iteration with decodes."""

    iterations: int
    tokens: float  # of each verification
    draft_s: float
    pass_s: float
    rest_s: float


class Row(Struct, frozen=True, kw_only=True):
    """One turn. vLLM alone has no iterations that anybody sees, and is not simulated."""

    name: str
    seed: int  # of the load
    requests: int
    took_s: float  # until the last answer
    live: Attained
    simulated: Attained | None = None
    phases: Phases | None = None
    cost: DraftCost = 0.0  # of a draft, as measured


def attained(load: RisingLoad, requests: Sequence[PlannedRequest], met: Sequence[bool]) -> Attained:
    """`met` runs along the requests."""

    def fraction(among: Sequence[bool]) -> float:
        return fmean(among) if among else 1.0

    both = list(zip(requests, met, strict=True))
    stages = range(len(load.rates_per_s))
    tokens = sum(request.output_tokens for request, good in both if good)
    return Attained(
        met=fraction(met),
        by_tier={
            tier: fraction([good for request, good in both if request.tier == tier])
            for tier in load.tiers.tiers
        },
        by_stage=[
            fraction([good for request, good in both if load.stage(request) == stage])
            for stage in stages
        ],
        goodput_tokens_per_s=tokens / load.duration_s,
    )


def phases(iterations: Sequence[Iteration]) -> Phases | None:
    decoding = [one for one in iterations if one.shape.decodes]
    if not decoding:
        return None
    verifications = sum(one.verifications for one in decoding)
    return Phases(
        iterations=len(decoding),
        tokens=1 + sum(one.accepted for one in decoding) / max(1, verifications),
        draft_s=fmean(one.draft_s for one in decoding),
        pass_s=fmean(one.pass_s for one in decoding),
        rest_s=fmean(one.rest_s for one in decoding),
    )


def markdown(rows: Sequence[Row], load: RisingLoad) -> str:
    """A line for each system: the mean of its turns, with the least and the most attained."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    head = [
        "SLO met, %", "live", "simulated", "apart", *load.tiers.tiers,
        *(f"at {rate:g}/s" for rate in load.rates_per_s), "tokens/s in SLO", "until the last, s",
        "iterations", "draft, ms", "pass", "rest", "tokens a verification", "draft costs",
    ]  # fmt: skip
    return table(head, [_line(name, turns) for name, turns in by_name.items()])


def _line(name: str, turns: Sequence[Row]) -> list[str]:
    def mean(values: Iterable[float], form: str = ".0f") -> str:
        return format(fmean(values), form)

    first, met = turns[0], [100 * row.live.met for row in turns]
    spread = f" ({min(met):.1f} to {max(met):.1f})" if len(turns) > 1 else ""
    told = [100 * row.simulated.met for row in turns if row.simulated is not None]
    seen = [row.phases for row in turns if row.phases is not None]
    costs = [fractions_of(row.cost) for row in turns]
    return [
        f"`{name}`",
        f"{fmean(met):.1f}{spread}",
        f"{fmean(told):.1f}" if told else "",
        f"{fmean(met) - fmean(told):+z.1f}" if told else "",
        *(mean(100 * row.live.by_tier[tier] for row in turns) for tier in first.live.by_tier),
        *map(mean, zip(*([100 * met for met in row.live.by_stage] for row in turns), strict=True)),
        mean(row.live.goodput_tokens_per_s for row in turns),
        mean((row.took_s for row in turns), ".1f"),
        *(
            (
                f"{sum(one.iterations for one in seen)}",
                *(
                    f"{1e3 * fmean(getattr(one, part) for one in seen):.2f}"
                    for part in ("draft_s", "pass_s", "rest_s")
                ),
                f"{fmean(one.tokens for one in seen):.2f}",
                ", ".join(f"{fmean(each):.2f}" for each in zip(*costs, strict=True)),
            )
            if seen
            else [""] * 6
        ),
    ]
