"""Slackline and the ten other policies, each at one setting for every load."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.papers.experiment import Run, violated_fraction
from loadgen.lab.papers.section import MISSING, Results

OURS = "slackline"
CHUNK = {"chunk_tokens": "512"}
# Of the settings of `qoserve` the one that suits loads of short prompts with tight paces.
FIXED_CHUNK = {"dynamic_chunking": "false", **CHUNK}
OTHERS: Mapping[str, Mapping[str, str]] = {
    "fcfs": CHUNK,
    "edf": CHUNK,
    "sjf": CHUNK,
    "srpf": CHUNK,
    "slos_serve": {},
    "qoserve": {"alpha_low_s": "0.008"},
    "sola": {"max_batch_tokens": "1024"},
    "adaserve": {},
    "ascendra": {},
    "vllm": {"max_num_batched_tokens": "512"},
}
# Not those that the matrix was made with.
SEEDS = (21, 22, 23)


def ours(run: Run) -> Run:
    return replace(run, policy=OURS)


def other(run: Run, policy: str) -> Run:
    return replace(run, policy=policy, settings=dict(OTHERS[policy]))


def met_percent(results: Results, run: Run) -> float | None:
    """Requests (of sessions, sessions) whose SLO was met; None: not run."""
    figures = results.figures(run)
    return None if figures is None else 100 * (1 - violated_fraction(figures))


def met_value_percent(results: Results, run: Run) -> float | None:
    """Requests whose SLO was met, where one counts as often as its tier is important; None: not
    run.
    """
    figures = results.figures(run)
    if figures is None:
        return None
    groups = [(run.tiers.tiers[name].importance, group) for name, group in figures.by_tier.items()]
    violated = sum(importance * group.violated for importance, group in groups)
    return 100 * (1 - violated / sum(importance * group.offered for importance, group in groups))


def percents(results: Results, run: Run, seeds: Sequence[int]) -> Sequence[float] | None:
    """The same for each of the seeds; None while one has not run."""
    each = [met_percent(results, replace(run, seed=seed)) for seed in seeds]
    known = [value for value in each if value is not None]
    return known if len(known) == len(seeds) else None


def percents_by_importance(
    results: Results, run: Run, seeds: Sequence[int]
) -> tuple[Sequence[float], Sequence[float]] | None:
    """Requests whose SLO was met, in %, for each of the seeds: of the important ones, and of the
    others; None while a seed has not run.
    """
    found = []
    for seed in seeds:
        figures = results.figures(replace(run, seed=seed))
        if figures is None or len(figures.by_importance) < 2:
            return None
        groups = figures.by_importance
        ordered = sorted(groups, key=float, reverse=True)
        found.append([100 * (1 - groups[k].violated / groups[k].offered) for k in ordered])
    important, others = zip(*found, strict=True)
    return important, others


def spread(values: Sequence[float] | None) -> str:
    """The mean, with the least and the most in brackets."""
    if values is None:
        return MISSING
    return f"{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def lead(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """By how many points mine are ahead, seed by seed: the mean, with the least and the most in
    brackets.
    """
    ahead = [ours - other for ours, other in zip(mine, theirs, strict=True)]
    mean = sum(ahead) / len(ahead)
    return f"{mean:+z.1f} ({min(ahead):+z.1f} to {max(ahead):+z.1f})"
