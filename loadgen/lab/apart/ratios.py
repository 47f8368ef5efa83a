"""Together or apart over ratios of prompt and output, paces and links."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.apart.kept import Kept
from loadgen.lab.apart.runs import DISTSERVE, PACES, Job
from shared.vocabulary import Role

REPLICAS = 4
# Requests a second for each pace: at 25 and 100 ms `qoserve` together meets 92 % or more, at
# 16 ms `slackline` about 70 %.
RATES: dict[str, dict[str, tuple[float, ...]]] = {
    "a100-llama3-8b": {
        "6000:100": (5.0, 7.8, 2.5),
        "1500:300": (18.0, 31.0, 12.0),
        "300:600": (35.5,),
    }
}
LINKS = (100.0, 25.0, 400.0)  # Gbit/s; the split is the best of those tried at the first
# Of REPLICAS, those that compute prompts only: the numbers tried.
SPLITS = {"6000:100": (3, 2), "1500:300": (2, 3), "300:600": (1, 2)}
BY_REQUEST = (1, 2)  # the same, where the others serve both: the router decides for each request
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
    *(f"by request, {link:g}" for link in sorted(LINKS[:2])),
)


class Cells(NamedTuple):
    """The fractions of a load that met their SLO under a policy; means of seeds."""

    together: float
    prefill: int  # of the best split
    apart: dict[float, float]  # by link
    by_request: dict[float, float]  # at the first two links


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
                rate_rps=rate_rps,
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
        for pace, rate_rps in zip(PACES, rates, strict=False)
        for policy in policies or POLICIES
    ]


def fill(kept: Kept, jobs: Sequence[Job]) -> Cells:
    def met(count: int, link_gbit_s: float, least: float = 0.0, rest: Role = Role.DECODE) -> float:
        """The part that is met; a run ends once less than `least` can be."""
        asked = [
            replace(
                job, prefill=count, rest=rest, link_gbit_s=link_gbit_s, most_violated=1.0 - least
            )
            for job in jobs
        ]
        return sum(kept.row(job).met for job in asked) / len(asked)

    first, *others = LINKS
    found: dict[int, float] = {}
    for split in SPLITS[jobs[0].load]:
        found[split] = met(split, first, max(found.values(), default=0.0))
    best = max(found, key=lambda split: found[split])
    apart = {first: found[best], **{link: met(best, link) for link in others}}
    mixed: dict[int, float] = {}
    for count in BY_REQUEST:
        mixed[count] = met(count, first, max(mixed.values(), default=0.0), Role.BOTH)
    count = max(mixed, key=lambda count: mixed[count])
    slower = met(count, others[0], 0.0, Role.BOTH)
    return Cells(met(0, 0.0), best, apart, {first: mixed[count], others[0]: slower})


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
            *(f"{100 * cell.by_request[link]:.0f}" for link in sorted(cell.by_request)),
        )
        for (job, *_), cell in zip(asked, found, strict=True)
    ]
