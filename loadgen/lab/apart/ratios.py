"""Together or apart over ratios of prompt and output, paces and links."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.apart.kept import Kept
from loadgen.lab.apart.runs import DISTSERVE, PACES, Job

REPLICAS = 4
# Requests a second at which `qoserve` together meets about 90 %, tight and loose.
RATES = {
    "a100-llama3-8b": {"6000:100": (5.0, 7.8), "1500:300": (18.0, 31.0), "300:600": (35.5, 60.0)},
    "a100-llama3-70b-tp4": {"6000:100": (1.5, 2.6)},
}
LINKS = (100.0, 25.0, 400.0)  # Gbit/s; the split is the best of those tried at the first
SPLITS = (2, 1, 3)  # replicas that compute prompts alone, of REPLICAS
POLICIES = ("slackline", "slos_serve", "qoserve", DISTSERVE)
HEADS = (
    "profile",
    "load",
    "pace",
    "requests/s",
    "policy",
    "together",
    "prefill",
    *(f"{link:g} Gbit/s" for link in sorted(LINKS)),
)


class Cells(NamedTuple):
    """What is known of a load under a policy, as fractions whose SLO was met; means of seeds."""

    together: float
    prefill: int  # of the best split
    apart: dict[float, float]  # by link


def cells(
    profiles: Sequence[str] | None,
    policies: Sequence[str] | None,
    seeds: Sequence[int],
    seconds: float,
) -> list[list[Job]]:
    """A load under a policy, together, with each seed."""
    return [
        [
            Job(
                policy=policy,
                load=load,
                tiers=pace,
                rate_rps=rates[n],
                seconds=seconds,
                seed=seed,
                profile=profile,
                replicas=REPLICAS,
            )
            for seed in seeds
        ]
        for profile, loads in RATES.items()
        if profile in (profiles or RATES)
        for load, rates in loads.items()
        for n, pace in enumerate(PACES)
        for policy in policies or POLICIES
    ]


def fill(kept: Kept, jobs: Sequence[Job]) -> Cells:
    def met(prefill: int, link_gbit_s: float, most_violated: float = 1.0) -> float:
        rows = [
            kept.row(
                replace(job, prefill=prefill, link_gbit_s=link_gbit_s, most_violated=most_violated)
            )
            for job in jobs
        ]
        return sum(row.met for row in rows) / len(rows)

    first, *others = LINKS
    found: dict[int, float] = {}
    for split in SPLITS:  # a run ends once it is worse than the best so far
        found[split] = met(split, first, 1.0 - max(found.values(), default=0.0))
    best = max(found, key=lambda split: found[split])
    apart = {first: found[best], **{link: met(best, link) for link in others}}
    return Cells(met(0, 0.0), best, apart)


def lines(asked: Sequence[Sequence[Job]], found: Sequence[Cells]) -> list[tuple[str, ...]]:
    return [
        (
            job.profile,
            job.load,
            job.tiers,
            f"{job.rate_rps:g}",
            f"`{job.policy}`",
            f"{100 * cell.together:.0f}",
            f"{cell.prefill} of {job.replicas}",
            *(f"{100 * cell.apart[link]:.0f}" for link in sorted(LINKS)),
        )
        for (job, *_), cell in zip(asked, found, strict=True)
    ]
