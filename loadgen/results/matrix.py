"""The matrix of docs/which-policy.md: all policies on the workloads of all papers.

Each load is offered at the capacity of the best policy. The search for it passes a rate if one of
the policies passes it. Sarathi's four orders run with the chunk that suits EDF best at that rate.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.figures import Figures
from loadgen.results.experiment import BOUND, Run, violated_fraction
from loadgen.results.experiment import PROFILE as QOSERVE_PROFILE
from loadgen.results.job import VIOLATIONS, Search
from loadgen.results.qoserve import figure7
from loadgen.results.qoserve import systems as qoserve_systems
from loadgen.results.section import MISSING, Chapter, Page, Results, Section, figure, table
from loadgen.results.slos_serve.systems import BURSTS, BURSTY_GAPS
from loadgen.simulator.deployment import ACCEPTANCE
from shared.perf.draft import DRAFT
from shared.tiers import load_tiers

REPLICAS = 2  # the fewest that have Ascendra's pools, and a next replica for SLOs-Serve
PROFILE = "a100-llama3-8b"
PRECISION = 0.05
STEP = 1.1  # small, since the first rates below are near the capacity
SEED = 7  # not 1, against which some of the policies were written
CHUNKS = ("256", "512", "1024")
FIXED = ("fcfs", "edf", "sjf", "srpf")
OTHERS = ("slos_serve", "qoserve", "sola", "adaserve", "ascendra", "vllm")
# QoServe's loads are offered at so many times QoServe's capacity. At the capacity itself half an
# hour does not separate the policies: deadlines of 10 and 30 minutes hide which of them fall
# behind.
QOSERVE_TIMES = 1.5
NEAR_POINTS = 1.0  # within so many points of the best a policy is as good: there is one seed


class Load(NamedTuple):
    """A load, as a run without a policy.

    `run.duration_s` is that of `--hours 1`. `run.rate_rps` is the rate of all replicas that the
    search tries first. With `figure7` there is no search: the rate is QOSERVE_TIMES the capacity
    that Figure 7 found for one QoServe replica, times REPLICAS.
    """

    name: str
    run: Run
    violations: float = 0.1
    figure7: bool = False


def _load(
    workload: str,
    tiers: str,
    rate_rps: float,
    duration_s: float,
    definition: str,
    *,
    profile: str = PROFILE,
    bursty: bool = False,
    draft: float = DRAFT,
    wait_s: float | None = None,
) -> Run:
    return Run(
        policy="",
        workload=workload,
        rate_rps=rate_rps,
        duration_s=duration_s,
        tiers=load_tiers(tiers),
        replicas=REPLICAS,
        profile=profile,
        definition=definition,
        arrivals=BURSTY_GAPS if bursty else "poisson",
        bursts=BURSTS if bursty else "",
        draft=draft,
        wait_s=wait_s,
        seed=SEED,
    )


LOADS = (
    *(
        Load(
            f"QoServe, {name}",
            _load(workload, "qoserve-3", 0.0, 1800, "deadline", profile=QOSERVE_PROFILE),
            VIOLATIONS,
            figure7=True,
        )
        for workload, name in {
            "azure-code": "code",
            "azure-conv": "conversations",
            "sharegpt": "ShareGPT",
        }.items()
    ),
    Load("SLOs-Serve, ChatBot", _load("chatbot", "slos-serve-chatbot", 18.5, 240, "max-tpot-10")),
    Load(
        "SLOs-Serve, Coder",
        _load("coder", "slos-serve-coder", 8.5, 600, "max-tpot-10", bursty=True),
    ),
    Load(
        "SLOs-Serve, Summarizer",
        _load("summarizer", "slos-serve-summarizer", 12.6, 300, "max-tpot-10"),
    ),
    Load("SLOs-Serve, Mixed", _load("mixed", "slos-serve-mixed", 17.0, 240, "max-tpot-10")),
    Load(
        "SLOs-Serve, ToolLLM",
        _load("toolllm", "slos-serve-toolllm", 2.6, 600, "max-tpot-10", bursty=True, draft=0.0),
    ),
    Load(
        "SLOs-Serve, Reasoning",
        _load("reasoning", "slos-serve-reasoning", 0.65, 1200, "max-tpot-10", draft=0.0),
    ),
    Load("SOLA, tight", _load("chatbot", "sola-llama3-8b-tight", 20.0, 240, "mean-tpot")),
    # First tokens have no deadline there: with enough time at the end, a policy that holds requests
    # back long enough violates none at any rate.
    Load(
        "AdaServe", _load("adaserve-placeholder", "adaserve-3", 30.0, 150, "mean-tpot", wait_s=20.0)
    ),
    Load("Ascendra", _load("sharegpt", "ascendra-8b-sharegpt", 5.5, 480, "mean-tpot")),
)


def with_policy(load: Load, policy: str, **settings: str) -> Run:
    return replace(load.run, policy=policy, settings=settings)


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
    fixed = (with_policy(load, policy, chunk_tokens=CHUNKS[1]) for policy in ("srpf", "edf"))
    first, *rivals = (*(with_policy(load, policy) for policy in OTHERS), *fixed)
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


class Row(NamedTuple):
    """The results of one load. None: not run."""

    rate_rps: float | None
    chunk: str | None
    by_policy: dict[str, Figures | None]
    bound_met: float | None


def row_of(load: Load, results: Results) -> Row:
    rate_rps = rate_of(load, results)
    if not rate_rps:
        return Row(rate_rps, None, dict.fromkeys((*FIXED, *OTHERS)), None)
    offered = load._replace(run=replace(load.run, rate_rps=rate_rps))
    by_chunk = {
        chunk: results.figures(with_policy(offered, "edf", chunk_tokens=chunk)) for chunk in CHUNKS
    }
    bound = results.bound(replace(offered.run, policy=BOUND))
    by_policy: dict[str, Figures | None] = {
        name: results.figures(with_policy(offered, name)) for name in OTHERS
    }
    violated = {
        chunk: violated_fraction(figures)
        for chunk, figures in by_chunk.items()
        if figures is not None
    }
    chunk = min(violated, key=violated.__getitem__) if len(violated) == len(CHUNKS) else None
    for name in FIXED:
        by_policy[name] = (
            None
            if chunk is None
            else results.figures(with_policy(offered, name, chunk_tokens=chunk))
        )
    return Row(rate_rps, chunk, by_policy, None if bound is None else bound.met_fraction)


def render(results: Results, duration_s: float) -> str:
    loads = [
        load._replace(
            run=replace(load.run, duration_s=round(load.run.duration_s * duration_s / 3600, 1))
        )
        for load in LOADS
    ]
    rows = {load.name: row_of(load, results) for load in loads}
    met = [
        (name, *cells(row), figure(percent(row.bound_met), percent=True))
        for name, row in rows.items()
    ]
    offered = [
        (
            load.name,
            load.run.workload,
            load.run.tiers.name,
            load.run.definition,
            f"{load.run.duration_s:g} s",
            figure(row.rate_rps),
            count(row),
            row.chunk or MISSING,
        )
        for load, row in zip(loads, rows.values(), strict=True)
    ]
    return "\n\n".join(
        (
            table(("load", *FIXED, *OTHERS, "bound"), met),
            "The load that was offered to two replicas together:",
            table(
                (
                    "load",
                    "workload",
                    "tiers",
                    "definition",
                    "arrivals",
                    "requests/s",
                    "requests",
                    "chunk",
                ),
                offered,
            ),
        )
    )


def cells(row: Row) -> Sequence[str]:
    """Requests met in %; bold within NEAR_POINTS of the best."""
    met = {
        name: percent(None if figures is None else 1 - violated_fraction(figures))
        for name, figures in row.by_policy.items()
    }
    best = max((value for value in met.values() if value is not None), default=0.0)
    shown = []
    for name in (*FIXED, *OTHERS):
        value = met[name]
        text = figure(value, percent=True)
        shown.append(f"**{text}**" if value is not None and value >= best - NEAR_POINTS else text)
    return shown


def count(row: Row) -> str:
    offered = (figures.offered for figures in row.by_policy.values() if figures is not None)
    return next(map(str, offered), MISSING)


def percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


SECTION = Section(
    name="matrix",
    title="Attainment at the capacity of the best policy",
    paper=f"""\
Requests whose SLO was met, in % of those offered (ToolLLM: sessions). Each load is offered at the
highest rate (to {100 * PRECISION:g} %) at which one of the policies still meets 90 % of the
requests. QoServe's loads are overload: {QOSERVE_TIMES:g} times the rate at which QoServe meets 99 %
for hours ([results.md](results.md), Figure 7); at that rate itself, half an hour does not separate
the policies. Values within {NEAR_POINTS:g} point of the best are bold. The bound is the attainment
that no scheduler without a draft model can exceed, even if it knows the future
([bound.md](bound.md)).""",
    hours=1,
    render=render,
    discussion="""\
**Deadlines of a second or less, and more work than fits** (the loads of SLOs-Serve, SOLA and
Ascendra): `slos_serve`. It declines at arrival the requests that cannot be served in time (3 to 10
% of them), so that hardly any other request is late. That is most of its lead; drafts while no
prompt waits for its prefill add up to 4 points. Without drafts (`speculate=never`) it meets 90.6 %
on ChatBot, 88.3 on Summarizer, 93.6 on Mixed, and as much as with them on Coder, SOLA's load and
Ascendra's.

**The same loads without a planner**: `srpf` with the right chunk is second on SLOs-Serve's loads.
It gives up no request, but long prompts wait for all others, so that only they are late. `fcfs`
with the same chunk meets up to 60 points less: once it is late, it is late for all requests. The
chunk decides more than the order: with 256 tokens `edf` meets 5 % on ChatBot, with 512 52 %.

**A pace over each ten tokens** (`max-tpot-10`): not `qoserve`. It spends the slack that early
tokens have earned on longer iterations, as its own definition allows. On ChatBot 22 % of its
requests break the pace; by `deadline` it meets 76.5 % instead of 54.5. By mean TPOT (SOLA's and
Ascendra's loads) it is second.

**A pace close to that of a decode alone** (AdaServe's load): only a draft model helps. `adaserve`
keeps the pace for 87 % of the coding requests; a policy that prefills prompts as they arrive and
does not draft keeps it for hardly one in ten. `vllm` with `spec_tokens=4` does as well as
`adaserve` there (92.7 % of all requests). `slos_serve`, which puts prompts first, comes next, and
meets 25 % without drafts. Do not use `adaserve` where first tokens have deadlines: it ignores them.

**`sola`** balances the TTFT and TPOT of all requests and gives up none: above its capacity all are
late alike, most of all where tiers differ (3.5 % met on Mixed). **`ascendra`** has one replica less
for throughput; by mean TPOT, as in its paper, it is third or fourth. **`vllm`** as shipped has
iterations of 2,048 tokens, in which half of its requests on ChatBot and Mixed lose the pace; with
512 it equals `fcfs`.

**Deadlines of minutes beside one of seconds, and half as much load again as capacity** (QoServe's
loads): `qoserve`, then `edf` with the right chunk: requests with half an hour wait, and the others
are served. Half an hour flatters `edf`: the requests that it postpones fall due later, and over
hours it carries a fifth to a third less ([results.md](results.md), Figure 7). Orders that know no
deadline lose a tenth (`sjf`, `srpf`: the long requests) to half (`fcfs`, `vllm`). `slos_serve`
declines at arrival requests for which there would have been time. Its admission lets go of nothing:
as in its paper, a request that it has taken counts with all the KV that it will hold, also while it
waits without any, and as a decode from its deadline on for ever. Requests with half an hour wait by
the hundred, so the KV counts as promised, and requests whose first token is due within 6 s are
declined: in the first 300 s of code at this rate 200 of 1,115 of these and no other, and nine of
ten times for want of KV. `sola` loses all tiers alike. `adaserve` prefills prompts as they arrive:
a request whose first token is due within 6 s waits as long as one with half an hour, minutes in the
median.

**Reasoning** separates the policies least. Its prompts are short: three times the prefill of one
alone is 50 ms, and an iteration of fifty decodes takes half of that. A request that arrives while
two others wait for their prefill is late in any order.
""",
)

PAGE = Page(
    file="which-policy.md",
    introduction="""\
# Which policy for which load

Ten policies on the loads of five papers, simulated on two A100s with Llama-3-8B. The page is made
by `python -m loadgen.results --only matrix`; [policies.md](policies.md) describes the policies.
""",
    chapters=(
        Chapter(
            name="which-policy",
            title="The matrix",
            setup=f"""\
- Every policy runs with its defaults, on the same requests (seed {SEED}). Sarathi's orders (`fcfs`,
  `edf`, `sjf`, `srpf`) get the chunk of {", ".join(CHUNKS[:-1])} or {CHUNKS[-1]} tokens that suits
  `edf` best at that load; the second table states it.
- `slos_serve` and `adaserve` may speculate. An iteration of the draft takes {100 * DRAFT:g} % of
  the target's, and its first tokens are accepted with probability {ACCEPTANCE:g}. There is no draft
  on ToolLLM and Reasoning, as in their paper. The other policies do not use the draft.
- `ascendra` has one replica in each pool.
- The workload of some loads is a placeholder, or stands in for a dataset that is not at hand
  ([simulator.md](simulator.md)). Such a load shows which policy does better on it, and says nothing
  about the paper's figures.
- Runs last minutes, which is enough where deadlines are seconds. AdaServe's SLOs have no TTFT; so
  that a policy does not win there by holding requests back, requests that have not ended 20 s after
  the last arrival count as violated.
""",
            sections=(SECTION,),
        ),
    ),
)
