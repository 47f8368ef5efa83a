"""The matrix of docs/which-policy.md: all policies on the loads of all papers.

Each load is offered at the capacity of the best policy. The search for it passes a rate if one of
the policies passes it.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from loadgen.lab.papers.matrix.loads import LOADS, Load
from loadgen.lab.papers.matrix.row import (
    PRECISION,
    QOSERVE_TIMES,
    SEEDS,
    TUNING_SEED,
    Met,
    Row,
    row_of,
)
from loadgen.lab.papers.matrix.settings import (
    CHUNK_ORDER,
    CHUNKS,
    FIXED,
    PAPERS,
    settings_of,
    shown,
)
from loadgen.lab.papers.section import MISSING, Chapter, Page, Results, Section, figure
from loadgen.markdown import table
from loadgen.simulator.deployment import ACCEPTANCE
from shared.perf.draft import DRAFT

NEAR_POINTS = 1.0  # within so many points of the best a policy is as good


def render(results: Results, duration_s: float) -> str:
    loads = [
        load._replace(
            run=replace(load.run, duration_s=round(load.run.duration_s * duration_s / 3600, 1))
        )
        for load in LOADS
    ]
    rows = {load.name: row_of(load, results) for load in loads}
    return "\n\n".join(
        (
            table(
                ("load", *FIXED, *PAPERS, "bound"),
                [
                    (name, *cells(row.printed, row), attainment(row.bound))
                    for name, row in rows.items()
                ],
            ),
            "Each paper's policy at the setting that suits it best at that load:",
            table(("load", *PAPERS), [(name, *cells(row.best, row)) for name, row in rows.items()]),
            "Those settings, where they are not what the paper prints:",
            table(
                ("load", *PAPERS),
                [(load.name, *best_settings(load, rows[load.name])) for load in loads],
            ),
            "The load that was offered to two replicas together:",
            offered(loads, list(rows.values())),
        )
    )


def cells(met: Mapping[str, Met | None], row: Row) -> Sequence[str]:
    """Requests met in %; bold within NEAR_POINTS of the best of the row."""
    means = [each.mean for each in (*row.printed.values(), *row.best.values()) if each is not None]
    best = max(means, default=0.0)
    return [
        f"**{attainment(each)}**"
        if each is not None and 100 * each.mean >= 100 * best - NEAR_POINTS
        else attainment(each)
        for each in met.values()
    ]


def attainment(met: Met | None) -> str:
    """The mean of the seeds, with the least and the most of them."""
    if met is None:
        return MISSING
    least, most = (figure(100 * value) for value in (min(met.fractions), max(met.fractions)))
    mean = figure(100 * met.mean)
    return mean if least == most else f"{mean} ({least} to {most})"


def best_settings(load: Load, row: Row) -> Sequence[str]:
    return [
        MISSING
        if settings is None
        else ""
        if settings == load.settings_of(policy)[0]
        else shown(settings)
        for policy, settings in row.settings.items()
    ]


def offered(loads: Sequence[Load], rows: Sequence[Row]) -> str:
    return table(
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
        [
            (
                load.name,
                load.run.workload,
                load.run.tiers.name,
                load.run.definition,
                f"{load.run.duration_s:g} s",
                figure(row.rate_rps),
                MISSING if row.offered is None else f"{row.offered}",
                row.chunk or MISSING,
            )
            for load, row in zip(loads, rows, strict=True)
        ],
    )


def candidates() -> str:
    """A table of the settings that each policy may have, and when."""
    rows = []
    for policy in PAPERS:
        drafting, plain = (settings_of(policy, drafts=drafts) for drafts in (True, False))
        cases = {"": plain} if drafting == plain else {"with a draft": drafting, "without": plain}
        for when, (first, *others) in cases.items():
            rows.append((f"`{policy}`", when, shown(first), "; ".join(map(shown, others))))
    return table(("policy", "", "as its paper prints it", "else"), rows)


SECTION = Section(
    name="matrix",
    title="Attainment at the capacity of the best policy",
    paper=f"""\
Requests whose SLO was met, in % of those offered (ToolLLM: sessions): the mean of {len(SEEDS)}
seeds, and in brackets the least and the most of them. Each load is offered at the highest rate (to
{100 * PRECISION:g} %) at which one of the policies still meets 90 % of the requests with seed
{TUNING_SEED}. QoServe's loads are overload: {QOSERVE_TIMES:g} times the rate at which QoServe meets
99 % for hours ([results.md](results.md), Figure 7); at that rate itself, five minutes do not
separate the policies. Means within {NEAR_POINTS:g} point of the best of both tables are bold.
The bound is the attainment that no scheduler without a draft model can exceed, even if it knows the
future ([bound.md](bound.md)).""",
    hours=0.5,
    render=render,
    discussion="""\
**Deadlines of a second or less, and more work than fits** (the loads of SLOs-Serve, SOLA and
Ascendra): `slos_serve`. At its best setting of those it is first on all eight. It declines at
arrival the requests that cannot be served in time, so that hardly any other request is late. The
setting matters: with draft lengths by the mean, as its paper prints them, a full batch lasts as
long as the mean allows, and what has less luck than the mean is late, nearly half of the windows of
ten tokens. On Coder and on Ascendra's load that costs 20 points and more against the default, which
plans with windows. `sit_out=true` is the best where prompts are due before a batch of the decodes
ends: by 13 points on Reasoning.

**The same loads without a planner**: `srpf` with the right chunk is the best of Sarathi's orders.
It gives up no request, but long prompts wait for all others, so that only they are late. `fcfs`
with the same chunk meets 6 to 59 points less, but for Reasoning, where the four orders are equal:
once it is late, it is late for all requests.

**A pace over each ten tokens** (`max-tpot-10`): not `qoserve` as printed. It spends the slack that
early tokens have earned on longer iterations, as its own definition allows. With a fixed chunk of
512 tokens (`dynamic_chunking=false`) it is level with `srpf` there or ahead of it, 10 to 30 points
better than as printed; on Reasoning it makes no difference. By mean TPOT (SOLA's and Ascendra's
loads) it is second as printed.

**A pace close to that of a decode alone** (AdaServe's load): only a draft model helps. `slos_serve`
that plans with the mean is first, since this load is judged by the mean; then `vllm` with
`spec_tokens=4` and `adaserve`. Policies that do not draft meet four requests in ten: nearly all of
the two tiers with a loose pace, and hardly one of the coding requests. Do not use `adaserve` where
first tokens have deadlines: it ignores them.

**`sola`** balances the TTFT and TPOT of all requests and gives up none: above its capacity all are
late alike, most of all where tiers differ (Mixed, Summarizer). **`ascendra`** has one replica less
for throughput; by mean TPOT, as in its paper, it is third to fifth. **`vllm`** as shipped has
iterations of 2,048 tokens, in which its requests lose the pace of ten tokens; with 512 it equals
`fcfs`.

**Deadlines of minutes beside one of seconds, and half as much load again as capacity** (QoServe's
loads): `qoserve`, and `slos_serve` with `long_deadlines=work`. Five minutes flatter most others:
the requests that they postpone fall due later. Over hours `edf` carries a fifth to a third less
than `qoserve` ([results.md](results.md), Figure 7). Policies that serve in the order of arrival
(`fcfs`, `vllm`, `adaserve`) lose a third, nearly all of the requests due within 6 s. `slos_serve`
as printed declines at arrival requests for which there would have been time. Its admission lets go
of nothing: as in its paper, a request that it has taken counts with all the KV that it will hold,
also while it waits without any, and as a decode from its deadline on for ever. Requests with half
an hour wait by the hundred, so the KV counts as promised, and requests whose first token is due
within 6 s are declined, mostly for want of KV. With `long_deadlines=work` they are not
([results.md](results.md), Beyond the paper).

**Reasoning**: its prompts are short: three times the prefill of one alone is 50 ms, and an
iteration of fifty decodes takes half of that. A request that arrives while two others wait for
their prefill is late in any order, unless the decodes sit out: with `sit_out=true`, or under `vllm`
with `mode=prefill_first`. That is not among the settings above. On other seeds it keeps 5.2 points
more there than `slos_serve` with `sit_out=true`
([slackline-results.md](slackline-results.md#the-loads-of-the-matrix)).
""",
)

PAGE = Page(
    file="which-policy.md",
    introduction="""\
# Which policy for which load

Ten policies on the loads of five papers, simulated on two A100s with Llama-3-8B. The default,
`slackline`, is not one of them: [slackline-results.md](slackline-results.md) has it on the same
loads, beside the best of the ten on each. The page is made by `python -m loadgen.lab.papers --only
matrix`; [policies.md](policies.md) describes the policies.
""",
    chapters=(
        Chapter(
            name="which-policy",
            title="The matrix",
            setup=f"""\
- Every paper's policy runs with what its paper prints, and with the setting that suits it best at
  that load, of those below. The setting is chosen with seed {TUNING_SEED}, and the tables are of
  the seeds {", ".join(map(str, SEEDS))}. Sarathi's orders (`fcfs`, `edf`, `sjf`, `srpf`) get the
  chunk of {", ".join(CHUNKS[:-1])} or {CHUNKS[-1]} tokens that suits `{CHUNK_ORDER}` best.
- Policies may draft. An iteration of the draft takes {100 * DRAFT:g} % of the target's, and its
  first tokens are accepted with probability {ACCEPTANCE:g}. There is no draft on ToolLLM,
  Reasoning and QoServe's loads, as in their papers.
- `ascendra` has one replica in each pool.
- The workload of some loads is a placeholder, or stands in for a dataset that is not at hand
  ([simulator.md](simulator.md)). Such a load shows which policy does better on it, and says nothing
  about the paper's figures.
- Runs last minutes, which is enough where deadlines are seconds. AdaServe's SLOs have no TTFT; so
  that a policy does not win there by holding requests back, requests that have not ended 20 s after
  the last arrival count as violated.

{candidates()}
""",
            sections=(SECTION,),
        ),
    ),
)
