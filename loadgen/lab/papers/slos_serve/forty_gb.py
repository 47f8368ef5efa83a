"""SLOs-Serve Figures 9 and 14 and section 6.1 with the KV of the paper's GPUs: A100s of 40 GB."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.ratios import geometric_mean, highest, ratio
from loadgen.lab.papers.section import Results, Section, compare, figure
from loadgen.lab.papers.slos_serve import systems as runs
from loadgen.markdown import table

# OPT-125m beside OPT-6.7B: a step reads 5 % of the bytes of one of 40 decodes of 900 tokens, and a
# prompt token has 1.3 % of the work (85 million parameters without embeddings, beside 6.4 billion).
DRAFT = (0.05, 0.013)


class Model(NamedTuple):
    """A model of the paper. `kv_tokens` is 0.9 of each GPU's 40 GB, less the weights of the model
    and of the draft, over what a token takes in both.
    """

    profile: str
    kv_tokens: int


MODELS = {
    "OPT-7B": Model(runs.PROFILE, 39_680),
    "OPT-13B, two GPUs": Model("a100-opt-13b-tp2", 51_280),
    "OPT-30B, four GPUs": Model("a100-opt-30b-tp4", 54_496),
}
UNDRAFTED, BARE = "no drafts", "no drafts, no best-effort tier"
SETTINGS: Mapping[str, Mapping[str, str]] = {
    runs.OURS: {},
    UNDRAFTED: {"speculate": "never"},
    BARE: {"speculate": "never", "best_effort": "false"},
}
SYSTEMS = (*runs.BASELINES, *SETTINGS)
# The rates tried first, in requests/s, for the baselines, for SLOs-Serve, and without drafts.
TRIED_RPS = {
    "chatbot": (3.5, 6.0, 4.3),
    "coder": (0.4, 3.5, 3.5),
    "summarizer": (2.8, 4.0, 3.4),
    "mixed": (3.5, 5.5, 4.8),
}
PUBLISHED = {"chatbot": 2.01, "summarizer": 2.02}  # the gain of speculation by scenario


def run_of(system: str, name: str, model: Model, rps: float, duration_s: float) -> Run:
    run = runs.scenario(runs.OURS, name, rps, duration_s, 1, **SETTINGS.get(system, {}))
    if system in runs.BASELINES:
        run = runs.scenario(system, name, rps, duration_s)
    return replace(run, profile=model.profile, kv_tokens=model.kv_tokens, draft=DRAFT)


def capacities(
    results: Results, name: str, model: Model, duration_s: float, violations: float = 0.1
) -> dict[str, float | None]:
    """The capacity of each system in a scenario."""
    baseline_rps, ours_rps, undrafted_rps = TRIED_RPS[name]
    first = {runs.OURS: ours_rps, UNDRAFTED: undrafted_rps}
    return {
        system: runs.capacity_rps(
            results,
            run_of(system, name, model, first.get(system, baseline_rps), duration_s),
            violations,
        )
        for system in SYSTEMS
    }


def over_best(rates: Mapping[str, float | None]) -> float | None:
    return ratio(rates[runs.OURS], highest([rates[system] for system in runs.BASELINES]))


def render(results: Results, duration_s: float) -> str:
    opt_7b, *larger = MODELS
    rows = {name: capacities(results, name, MODELS[opt_7b], duration_s) for name in TRIED_RPS}
    strict = capacities(results, "chatbot", MODELS[opt_7b], 2 * duration_s, violations=0.02)
    others = {model: capacities(results, "chatbot", MODELS[model], duration_s) for model in larger}
    every = {
        **{f"{opt_7b}, {name}": rates for name, rates in rows.items()},
        f"{opt_7b}, chatbot, 2 % violated": strict,
        **{f"{model}, chatbot": rates for model, rates in others.items()},
    }
    gains = [
        ("best baseline", 2.2, [over_best(rates) for rates in rows.values()]),
        ("no drafts", 1.66, [ratio(rates[runs.OURS], rates[UNDRAFTED]) for rates in rows.values()]),
        *(
            (f"no drafts, {name}", gain, [ratio(rows[name][runs.OURS], rows[name][UNDRAFTED])])
            for name, gain in PUBLISHED.items()
        ),
        (
            "no best-effort tier, both without drafts",
            1.34,
            [ratio(rates[UNDRAFTED], rates[BARE]) for rates in rows.values()],
        ),
        *(
            (f"{system}, ChatBot at 2 %", published, [ratio(strict[runs.OURS], rate)])
            for system, published, rate in (
                ("vLLM", 1.91, highest([strict[system] for system in runs.VLLM])),
                ("Sarathi", 2.19, strict[runs.SARATHI]),
            )
        ),
    ]
    return "\n\n".join(
        (
            table(
                ("requests/s", *SYSTEMS, "over the best"),
                [
                    (name, *map(figure, rates.values()), figure(over_best(rates)))
                    for name, rates in every.items()
                ],
            ),
            "OPT-7B, the geometric means of the scenarios:",
            table(
                ("SLOs-Serve over", "published", "ours", "ratio", ""),
                [(over, *compare(gain, geometric_mean(ratios))) for over, gain, ratios in gains],
            ),
        )
    )


SECTION = Section(
    name="slos-serve-40gb",
    title="The same on 40 GB: KV that binds",
    paper="""\
The paper's GPUs are A100s of 40 GB: one for OPT-7B, two for 13B, four for 30B, with OPT-125m on
every GPU. Published: 2.2 over the better of vLLM and Sarathi in six scenarios, 1.66 by speculation
in four (ChatBot 2.01, Summarizer 2.02), 1.34 by burst resilience; at 2 % violated 1.91 over vLLM
and 2.19 over Sarathi.""",
    hours=1 / 30,
    render=render,
    discussion="""\
**The draft** is charged by what OPT-125m reads and computes beside OPT-6.7B: a step 5 %, a prompt
token 1.3 %. **KV**: 39,680 tokens for OPT-7B, some forty requests of ChatBot. **Timing** is that of
an A100 of 80 GB, whose memory is 1.3 times as fast. 13B and 30B are by analysis
([profiles.md](profiles.md)).

Drafts gain 1.46 in ChatBot, where they gain 1.2 on 80 GB with a draft that costs 5 % in both: a
decode that ends sooner gives its KV back sooner, and KV is what admission lacks. Of the published
2.01 half is missing. What was tried: a step of 1.5 % instead of 5 (1.53 in ChatBot, 1.4 with 5 %
and the same rates tried first); drafts by the mean and appendix D alone (`speculate=paper`: 0.97
with either step). Summarizer gains 1.18, as on 80 GB: its outputs are short, and prompts take the
time. Why the paper has 2.02 there is not known.

Over the best baseline the mean of the four is the published one of six, by Coder's bursts (6.7).
Apart, ChatBot has 1.56 and Summarizer 1.3; published are 1.41 to 1.7 and 1.14 to 1.17. The
baselines carry the same in the other three: with KV for forty requests it hardly matters how they
are batched. Coder gains nothing by drafts (0.96, within the search's precision), as on 80 GB, and
all of its lead by declining.
""",
)
