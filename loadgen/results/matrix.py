"""All policies on the workloads of all papers: docs/which-policy.md.

Each load is offered at the rate that the best of the policies carries, found by a search in which a
rate counts as carried once one of them carries it. Sarathi's four orders run with the chunk that
suits EDF best there.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from loadgen.lab.figures import Figures
from loadgen.results.experiment import BOUND, Run, violated_fraction
from loadgen.results.experiment import PROFILE as QOSERVE_PROFILE
from loadgen.results.job import VIOLATIONS, Search
from loadgen.results.qoserve import figure7
from loadgen.results.qoserve import systems as settings
from loadgen.results.section import MISSING, Lab, Page, Part, Section, figure, table
from loadgen.results.slos_serve.systems import BURSTS, BURSTY_GAPS
from loadgen.simulator.simulation import ACCEPTANCE, DRAFT
from shared.tiers import load_tiers

REPLICAS = 2  # the fewest that have Ascendra's pools, and a next replica for SLOs-Serve
PROFILE = "a100-llama3-8b"
PRECISION = 0.05
STEP = 1.1  # the first rates below are near
SEED = 7  # some of the policies were looked at with seed 1 while they were written
CHUNKS = ("256", "512", "1024")
FIXED = ("fcfs", "edf", "sjf", "srpf")
OTHERS = ("slos_serve", "qoserve", "sola", "adaserve", "ascendra", "vllm")
# at what it carries, half an hour tells nobody apart: deadlines of 10 and 30 minutes hide who falls
# behind
QOSERVE_TIMES = 1.5
NEAR_POINTS = 1.0  # of the best: as good, with one seed


class Load(NamedTuple):
    """`run` with its policy left open; its `duration_s` is of a whole hour, its rate, of all
    replicas, the first that is tried.

    `figure7`: the rate is QOSERVE_TIMES what REPLICAS carry of what QoServe carries alone there,
    and is not searched for.
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
    # Nobody is due a first token there: with time enough at the end, whoever holds requests back
    # long enough violates none at any rate.
    Load(
        "AdaServe", _load("adaserve-placeholder", "adaserve-3", 30.0, 150, "mean-tpot", wait_s=20.0)
    ),
    Load("Ascendra", _load("sharegpt", "ascendra-8b-sharegpt", 5.5, 480, "mean-tpot")),
)


def served(load: Load, policy: str, **settings: str) -> Run:
    return replace(load.run, policy=policy, settings=settings)


def rate_of(load: Load, lab: Lab) -> float | None:
    """What the best carries, all replicas together; None: not known yet."""
    if load.figure7:
        workload = load.run.workload
        alone = settings.run(
            "qoserve",
            workload,
            figure7.PUBLISHED[workload]["qoserve"],
            3600 * figure7.SECTION.hours,
        )
        found = lab.capacity(Search(run=alone))
        return None if found is None else REPLICAS * QOSERVE_TIMES * found.rate_rps
    fixed = (served(load, policy, chunk_tokens=CHUNKS[1]) for policy in ("srpf", "edf"))
    first, *rivals = (*(served(load, policy) for policy in OTHERS), *fixed)
    found = lab.capacity(
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
    """None: not run."""

    rate_rps: float | None
    chunk: str | None
    made: dict[str, Figures | None]
    bound_met: float | None


def row_of(load: Load, lab: Lab) -> Row:
    rate_rps = rate_of(load, lab)
    if not rate_rps:
        return Row(rate_rps, None, dict.fromkeys((*FIXED, *OTHERS)), None)
    here = load._replace(run=replace(load.run, rate_rps=rate_rps))
    swept = {chunk: lab.figures(served(here, "edf", chunk_tokens=chunk)) for chunk in CHUNKS}
    limit = lab.bound(replace(here.run, policy=BOUND))
    made: dict[str, Figures | None] = {name: lab.figures(served(here, name)) for name in OTHERS}
    known = {chunk: violated_fraction(of) for chunk, of in swept.items() if of is not None}
    chunk = min(known, key=known.__getitem__) if len(known) == len(CHUNKS) else None
    made |= {
        name: None if chunk is None else lab.figures(served(here, name, chunk_tokens=chunk))
        for name in FIXED
    }
    return Row(rate_rps, chunk, made, None if limit is None else limit.met_fraction)


def body(lab: Lab, duration_s: float) -> str:
    loads = [
        load._replace(
            run=replace(load.run, duration_s=round(load.run.duration_s * duration_s / 3600, 1))
        )
        for load in LOADS
    ]
    rows = {load.name: row_of(load, lab) for load in loads}
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
            "What was offered, to two replicas together:",
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
    """Met in %, in bold whoever is within NEAR_POINTS of the best."""
    met = {
        name: percent(None if of is None else 1 - violated_fraction(of))
        for name, of in row.made.items()
    }
    best = max((value for value in met.values() if value is not None), default=0.0)
    shown = []
    for name in (*FIXED, *OTHERS):
        value = met[name]
        text = figure(value, percent=True)
        shown.append(f"**{text}**" if value is not None and value >= best - NEAR_POINTS else text)
    return shown


def count(row: Row) -> str:
    return next((str(of.offered) for of in row.made.values() if of is not None), MISSING)


def percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


SECTION = Section(
    name="matrix",
    title="Attainment at the capacity of the best",
    paper=f"""\
Requests whose SLO was met, of those offered, in % (ToolLLM: sessions). Each load is offered at the highest rate (to
{100 * PRECISION:g} %) at which one of the policies still meets 90 % of them. QoServe's loads are overload: {QOSERVE_TIMES:g} times the rate
at which it meets 99 % for hours ([results.md](results.md), Figure 7); at that rate itself, half an hour does not tell good from
bad. In bold: within {NEAR_POINTS:g} point of the best. The bound is what no scheduler without a draft model can exceed, one that knows the
future included ([bound.md](bound.md)).""",
    hours=1,
    body=body,
    notes="""\
**Deadlines of a second or less, more work than fits** (SLOs-Serve's loads, SOLA's, Ascendra's): `slos_serve`. It says no at arrival to
whoever cannot be served in time (3 to 10 % of the requests), so that hardly anybody else is late. That is most of it; drafts while nothing
waits for its prefill add up to 4 points. Without them (`speculate=never`) it meets 90.6 % on ChatBot, 88.3 on Summarizer, 93.6 on Mixed,
and as much as with them on Coder, SOLA's load and Ascendra's.

**The same without a planner**: `srpf` with the right chunk is the next best on SLOs-Serve's loads: it gives nobody up, but long prompts
wait for all others, so that they are late instead of everyone. `fcfs` with the same chunk meets up to 60 points
less: once late, it is late for all. The chunk decides more than the order: with 256 tokens `edf` meets 5 % on ChatBot, with 512 52 %.

**Pace over each ten tokens** (`max-tpot-10`): not `qoserve`. It spends the slack that early tokens have earned on longer iterations, which
its own definition allows: on ChatBot 22 % of its requests break the pace, and by `deadline` 76.5 % are met instead of 54.5. By mean TPOT
(SOLA's and Ascendra's loads) it is second.

**A pace near that of a decode alone** (AdaServe's): only a draft model helps. `adaserve` keeps it for 87 % of the coding requests, a policy
that prefills as they come and does not draft for hardly one in ten. `vllm` with `spec_tokens=4` does as well as `adaserve` there (92.7 % of
all); `slos_serve`, which thinks of prompts first, comes next, and without drafts it meets 25 %. Where first tokens are due `adaserve` is
not to be used: it does not look at them.

**`sola`** balances TTFT and TPOT of everybody and gives nobody up: beyond what it can carry all are late alike, with several kinds of
caller most of all (3.5 % met on Mixed). **`ascendra`** has a replica less for throughput; by mean TPOT, as in its paper, it comes third or
fourth. **`vllm`** as shipped has iterations of 2,048 tokens, in which half of its requests on ChatBot and Mixed lose the pace;
with 512 it is `fcfs`.

**Deadlines of minutes beside one of seconds, half as much again as can be carried** (QoServe's loads): `qoserve`, then `edf` with the right
chunk: who has half an hour waits, and the others are served. Half an hour flatters `edf`: what it puts off falls due later, and over hours
it carries a fifth to a third less ([results.md](results.md), Figure 7). Orders that know no deadline lose a tenth (`sjf`, `srpf`: the long)
to half (`fcfs`, `vllm`). `slos_serve` declines at the door what there would have been time for: it reads half of a TTLT as the time for
the output. `sola` loses all tiers alike, and `adaserve` prefills as they come: who is owed a first token within 6 s waits as long as who
has half an hour, minutes in the median.

**Reasoning** sets the policies apart least. Its prompts are short, three times what one takes alone is 50 ms, and an iteration of fifty
thoughts takes half of that: who arrives while two others do is late whatever the order.
""",
)

PAGE = Page(
    file="which-policy.md",
    head="""# Which policy for which load

Ten policies on the loads of five papers, simulated on two A100s with Llama-3-8B. Made by `python -m loadgen.results --only matrix`;
which policy does what is in [policies.md](policies.md).
""",
    parts=(
        Part(
            name="which-policy",
            title="The matrix",
            head=f"""\
- Every policy runs with its defaults, on the same requests (seed {SEED}). Sarathi's orders (`fcfs`, `edf`, `sjf`, `srpf`) get the chunk of
  {", ".join(CHUNKS[:-1])} and {CHUNKS[-1]} tokens that suits `edf` best at that load, stated in the second table.
- `slos_serve` and `adaserve` may speculate with a draft whose iterations take {100 * DRAFT:g} % of the target's and whose first tokens
  are accepted with probability {ACCEPTANCE:g}; not on ToolLLM and Reasoning, as in the paper of these. The others do not use it.
- `ascendra` has one replica of each pool.
- Loads whose workload is a placeholder, or stands for a dataset that is not at hand ([simulator.md](simulator.md)), say which policy
  does better on such a load, and nothing about the paper's figures.
- Runs are minutes long: enough where deadlines are seconds. AdaServe's SLOs have no TTFT; so that who holds requests
  back does not win by that, what has not ended 20 s after the last arrival counts as violated there.
""",
            sections=(SECTION,),
        ),
    ),
)
