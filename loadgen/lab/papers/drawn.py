"""Draws random loads for the laboratory: tiers, workload, definition, replicas, bursts, rate."""

import math
from random import Random

from msgspec.structs import replace

from loadgen.lab.papers.loads import OURS
from loadgen.lab.papers.run import PROFILE, Run
from shared.perf.draft import DRAFT
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Slo

# Requests a second that two A100s carry, roughly: so much of it is offered that some loads are
# light, and most are too heavy. And the mean output, roughly.
CARRIED_RPS = {
    "chatbot": 20.0,
    "coder": 10.0,
    "summarizer": 13.0,
    "mixed": 17.0,
    "sharegpt": 6.0,
    "azure-code": 10.0,
    "azure-conv": 12.0,
}
OUTPUT_TOKENS = dict(zip(CARRIED_RPS, (270, 25, 200, 150, 440, 20, 130), strict=True))
DEFINITIONS = ("deadline", "mean-tpot", "max-tpot-10")
SEVERAL = (("ttft_s", "tbt_s", "ttlt_s"), ("ttft_s", "ttlt_s"), ("tbt_s", "ttlt_s"))
PLAIN = (("ttft_s", "tbt_s"), ("ttlt_s",))


def drawn(rng: Random, low: float, high: float) -> float:
    """A number from `low` to `high`, drawn evenly in the logarithm, to two digits."""
    return float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.2g}")


def mix(seed: int, requests: float) -> Run:
    """One to three tiers: tight, moderate or whole answers (which owe nothing before their last
    token), equally likely.
    """
    rng = Random(seed)
    workload = rng.choice(tuple(CARRIED_RPS))
    tiers = {f"t{n}": _tier(rng) for n in range(rng.randint(1, 3))}
    replicas = rng.choice((2, 2, 4))
    rate_rps = CARRIED_RPS[workload] * replicas / 2 * rng.uniform(0.6, 1.6)
    bursty = rng.random() < 0.3
    return Run(
        policy=OURS,
        workload=workload,
        rate_rps=float(f"{rate_rps:.3g}"),
        duration_s=float(math.ceil(requests / rate_rps)),
        tiers=TierSet(name=f"mix-{seed}", default="t0", tiers=tiers),
        replicas=replicas,
        profile=rng.choice((PROFILE, "a100-llama3-8b")),
        definition=rng.choice(DEFINITIONS),
        arrivals="gamma:3" if bursty else "poisson",
        draft=rng.choice((0.0, DRAFT)),
        seed=seed,
    )


def _tier(rng: Random) -> Tier:
    kind = rng.randrange(3)
    if kind == 0:
        slo = Slo(ttft_s=drawn(rng, 0.3, 2.0), tbt_s=drawn(rng, 0.025, 0.06))
    elif kind == 1:
        slo = Slo(ttft_s=drawn(rng, 1.0, 10.0), tbt_s=drawn(rng, 0.05, 0.2))
    else:
        slo = Slo(ttlt_s=drawn(rng, 20.0, 600.0))
    return Tier(slo=slo, share=drawn(rng, 0.2, 1.0), importance=rng.choice((1.0, 1.0, 3.0)))


def several_bounds(seed: int, requests: float) -> Run:
    """As `mix`, with other SLOs: the first tier has a TTLT beside a TTFT, a pace, or both."""
    run, rng = mix(seed, requests), Random(f"several-{seed}")
    tiers = {
        name: Tier(
            slo=_bounds(
                rng, OUTPUT_TOKENS[run.workload], SEVERAL if name == "t0" else SEVERAL + PLAIN
            ),
            share=tier.share,
            importance=tier.importance,
        )
        for name, tier in run.tiers.tiers.items()
    }
    return replace(
        run,
        tiers=TierSet(name=f"several-{seed}", default="t0", tiers=tiers),
        definition=rng.choice((*DEFINITIONS, "ttlt")),
    )


def _bounds(rng: Random, tokens: int, kinds: tuple[tuple[str, ...], ...]) -> Slo:
    """A TTLT is one to three times the time of a mean output at its pace."""
    ttft_s, tbt_s = drawn(rng, 0.5, 5.0), drawn(rng, 0.03, 0.15)
    mean_s = ttft_s + tokens * tbt_s
    ttlt_s = drawn(rng, mean_s, 3.0 * mean_s)
    named = rng.choice(kinds)
    return Slo(
        ttft_s=ttft_s if "ttft_s" in named else None,
        tbt_s=tbt_s if "tbt_s" in named else None,
        ttlt_s=ttlt_s if "ttlt_s" in named else None,
    )
