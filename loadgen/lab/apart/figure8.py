"""QoServe's Figure 8 whole: the requests a second that a prefill replica carries, with the decode
replicas behind it, beside what it carries where requests end with their first token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.apart.kept import Kept
from loadgen.lab.apart.runs import Job
from loadgen.lab.papers.qoserve import LABELS, PREFILL_NODE
from loadgen.lab.papers.search import VIOLATIONS
from loadgen.trials.goodput import next_rate

LINK_GBIT_S = 100.0
PRECISION = 0.06
# Published for prefill nodes of Llama3-8B on A100s; the first rates tried.
PUBLISHED = {"fcfs": 5.7, "edf": 6.8, "qoserve": 7.3}
# By profile: the first rates tried, as parts of these.
PROFILES = {"a100-llama3-8b-qoserve": 1.0, "h100-llama3-70b-tp4": 0.6}
DECODE = 3  # replicas behind each that computes prompts
HEADS = ("profile", "policy", "first tokens only, requests/s", "whole, requests/s", "published")


class Carried(NamedTuple):
    alone_rps: float
    whole_rps: float


def cells(
    profiles: Sequence[str] | None,
    policies: Sequence[str] | None,
    seeds: Sequence[int],
    seconds: float,
) -> list[list[Job]]:
    return [
        [
            Job(
                policy=policy,
                load="azure-conv",
                tiers="qoserve-3",
                rate_rps=round(times * PUBLISHED[policy], 3),
                seconds=seconds,
                seed=seed,
                profile=profile,
                replicas=1,
                settings=(
                    ("chunk_tokens", "8192"),
                    ("router", "round_robin"),
                    *(PREFILL_NODE.items() if policy == "qoserve" else ()),
                ),
                first_token_only=True,
                most_violated=VIOLATIONS,
            )
            for seed in seeds
        ]
        for profile, times in PROFILES.items()
        if profile in (profiles or PROFILES)
        for policy in policies or PUBLISHED
    ]


def fill(kept: Kept, jobs: Sequence[Job]) -> Carried:
    def carried(job: Job) -> float:
        known: dict[float, bool] = {}
        while (rate := next_rate(known, PRECISION, job.rate_rps, 0.1)) is not None:
            known[rate] = kept.row(replace(job, rate_rps=rate)).met >= 1 - VIOLATIONS
        return max((rate for rate, passed in known.items() if passed), default=0.0)

    def mean(of: Sequence[Job]) -> float:
        return sum(map(carried, of)) / len(of)

    whole = {"replicas": 1 + DECODE, "prefill": 1, "link_gbit_s": LINK_GBIT_S}
    return Carried(
        mean(jobs), mean([replace(job, first_token_only=False, **whole) for job in jobs])
    )


def lines(asked: Sequence[Sequence[Job]], found: Sequence[Carried]) -> list[tuple[str, ...]]:
    return [
        (
            job.profile,
            LABELS[job.policy],
            f"{each.alone_rps:.3g}",
            f"{each.whole_rps:.3g}",
            f"{PUBLISHED[job.policy]:g}" if PROFILES[job.profile] == 1.0 else "",
        )
        for (job, *_), each in zip(asked, found, strict=True)
    ]
