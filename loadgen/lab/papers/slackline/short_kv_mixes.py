"""Loads drawn at random whose KV is short."""

from random import Random

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import Results, Section
from loadgen.lab.papers.slackline.mixes import MIXES, drawn, leads, mix

# Nothing was tuned with these seeds.
LOADS = range(9100, 9124)
LEAST_TOKENS, MOST_TOKENS = 20_000, 100_000


def load(seed: int, requests: float) -> Run:
    """A load as `mix` draws it, on replicas with little KV."""
    kv_tokens = drawn(Random(f"kv-{seed}"), LEAST_TOKENS, MOST_TOKENS)
    return replace(mix(seed, requests), kv_tokens=int(kv_tokens))


def render(results: Results, duration_s: float) -> str:
    return leads(results, [load(seed, duration_s) for seed in LOADS])


# A section's length is given in hours; here 3,600 times that are the requests of a load.
REQUESTS = 800

SECTION = Section(
    name="slackline-kv-mixes",
    title=f"{len(LOADS)} loads drawn at random, where KV is short",
    paper=f"""\
Drawn as the {len(MIXES)} loads above, but each replica has KV for {LEAST_TOKENS:,} to
{MOST_TOKENS:,} tokens. {REQUESTS} requests a load. Requests whose SLO was met, in points; an
important one counts as three.""",
    hours=REQUESTS / 3600,
    render=render,
    discussion="""\
In the mean `slackline` is 4.4 points ahead of whichever of the ten is best on a load, and behind by
more than half a point on two of the 24. Nothing was tuned with these seeds; what had been wrong was
found with 60 others
([decisions.md](decisions.md)).
""",
)
