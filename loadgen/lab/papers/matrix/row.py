"""One load of the matrix: its rate, the setting that suits each policy best, and the runs.

The rate and the settings are found with one seed, and the attainment with three others.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.papers.experiment import BOUND, Run, violated_fraction
from loadgen.lab.papers.job import Search
from loadgen.lab.papers.matrix.loads import REPLICAS, Load
from loadgen.lab.papers.matrix.settings import CHUNK_ORDER, CHUNKS, FIXED, PAPERS, Settings
from loadgen.lab.papers.qoserve import figure7
from loadgen.lab.papers.qoserve import systems as qoserve_systems
from loadgen.lab.papers.section import Results
from loadgen.trials.figures import Figures

# Not 1, against which some of the policies were written.
TUNING_SEED = 7
SEEDS = (8, 9, 10)
PRECISION = 0.05
STEP = 1.1  # small, since the first rates of the loads are near the capacity
# QoServe's loads are offered at so many times QoServe's capacity. At the capacity itself a quarter
# of an hour does not separate the policies: deadlines of 10 and 30 minutes hide which of them fall
# behind.
QOSERVE_TIMES = 1.5


class Met(NamedTuple):
    """The requests whose SLO was met with each of the seeds, as fractions of those offered."""

    fractions: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.fractions) / len(self.fractions)


class Row(NamedTuple):
    """The results of one load. None: not run."""

    rate_rps: float | None
    offered: int | None  # requests, with the first seed
    chunk: str | None
    printed: dict[str, Met | None]  # with Sarathi's orders
    best: dict[str, Met | None]
    settings: dict[str, Settings | None]  # the best ones
    bound: Met | None


def with_policy(load: Load, policy: str, settings: Settings, seed: int = TUNING_SEED) -> Run:
    return replace(load.run, policy=policy, settings=dict(settings), seed=seed)


def rate_of(load: Load, results: Results) -> float | None:
    """The rate at which the load is offered to all replicas together; None: not found yet."""
    if load.figure7:
        workload = load.run.workload
        alone = qoserve_systems.run(
            "qoserve",
            workload,
            figure7.PUBLISHED[workload]["qoserve"],
            3600 * figure7.SECTION.hours,
        )
        found = results.capacity(Search(run=alone))
        return None if found is None else REPLICAS * QOSERVE_TIMES * found.rate_rps
    chunk = {"chunk_tokens": CHUNKS[1]}
    first, *rivals = (
        *(
            with_policy(load, policy, settings)
            for policy in PAPERS
            for settings in load.settings_of(policy)
        ),
        *(with_policy(load, policy, chunk) for policy in ("srpf", "edf")),
    )
    found = results.capacity(
        Search(
            run=first,
            rivals=tuple(rivals),
            violations=load.violations,
            precision=PRECISION,
            step=STEP,
        )
    )
    return None if found is None else found.rate_rps


def best_settings(
    load: Load, policy: str, tried: Sequence[Settings], results: Results
) -> Settings | None:
    """The settings with the fewest violations, the first of equals; None: not all have run."""
    if len(tried) == 1:
        return tried[0]
    found = [results.figures(with_policy(load, policy, settings)) for settings in tried]
    known = [violated_fraction(figures) for figures in found if figures is not None]
    return tried[known.index(min(known))] if len(known) == len(tried) else None


def met(load: Load, policy: str, settings: Settings | None, results: Results) -> Met | None:
    """None while the settings or a run are missing."""
    if settings is None:
        return None
    return fractions([results.figures(with_policy(load, policy, settings, seed)) for seed in SEEDS])


def fractions(figures: Sequence[Figures | None]) -> Met | None:
    known = [1 - violated_fraction(each) for each in figures if each is not None]
    return Met(known) if len(known) == len(SEEDS) else None


def bound_of(load: Load, results: Results) -> Met | None:
    bounds = [results.bound(with_policy(load, BOUND, {}, seed)) for seed in SEEDS]
    known = [bound.met_fraction for bound in bounds if bound is not None]
    return Met(known) if len(known) == len(SEEDS) else None


def row_of(load: Load, results: Results) -> Row:
    rate_rps = rate_of(load, results)
    if not rate_rps:
        missing = dict.fromkeys((*FIXED, *PAPERS))
        none = dict.fromkeys(PAPERS)
        return Row(rate_rps, None, None, {**missing}, {**none}, {**none}, None)
    load = load._replace(run=replace(load.run, rate_rps=rate_rps))
    chunk = best_settings(
        load, CHUNK_ORDER, [{"chunk_tokens": tokens} for tokens in CHUNKS], results
    )
    settings = {
        policy: best_settings(load, policy, load.settings_of(policy), results) for policy in PAPERS
    }
    first = results.figures(with_policy(load, "qoserve", {}, SEEDS[0]))
    return Row(
        rate_rps,
        None if first is None else first.offered,
        None if chunk is None else chunk["chunk_tokens"],
        {
            **{policy: met(load, policy, chunk, results) for policy in FIXED},
            **{
                policy: met(load, policy, load.settings_of(policy)[0], results) for policy in PAPERS
            },
        },
        {policy: met(load, policy, settings[policy], results) for policy in PAPERS},
        settings,
        bound_of(load, results),
    )
