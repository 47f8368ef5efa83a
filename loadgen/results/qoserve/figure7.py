"""Figure 7: goodput of one replica by dataset."""

from loadgen.lab.figures import Figures
from loadgen.results.job import Search
from loadgen.results.qoserve.systems import LABELS, run
from loadgen.results.section import Lab, Section, compare, figure, table

# Requests/s. The figure has no numbers; these are the rates that the runs of the authors' artifact
# go up to.
PUBLISHED = {
    "azure-code": {"fcfs": 1.9, "edf": 2.9, "qoserve": 4.1},
    "azure-conv": {"fcfs": 2.9, "edf": 3.9, "qoserve": 4.7},
    "sharegpt": {"fcfs": 1.3, "edf": 2.1, "qoserve": 2.3},
}
# Half an hour each of what Azure recorded in 2023: nobody has published QoServe on it.
RECORDED = ("azure2023_code_first_half", "azure2023_conv_first_half")


def body(lab: Lab, duration_s: float) -> str:
    rows = []
    for workload, by_policy in PUBLISHED.items():
        for policy, published in by_policy.items():
            found = lab.capacity(Search(run=run(policy, workload, published, duration_s)))
            cells = compare(published, None if found is None else found.rate_rps)
            at = None if found is None or found.made is None else found.made.figures
            rows.append((workload, LABELS[policy], *cells, paced(at)))
    lines = [
        table(("workload", "policy", "published", "ours", "ratio", "", "of it by pace alone"), rows)
    ]
    recorded = []
    for trace in RECORDED:
        rates = {
            policy: lab.capacity(Search(run=run(policy, trace, first_rps, duration_s)))
            for policy, first_rps in (("fcfs", 2.0), ("edf", 3.0), ("qoserve", 4.0))
        }
        recorded.append(
            (
                trace,
                *(figure(None if found is None else found.rate_rps) for found in rates.values()),
            )
        )
    lines.append(
        "The same with the lengths of the two traces that Azure recorded in 2023 (nothing is published for them):"
    )
    lines.append(table(("lengths", "Sarathi-FCFS", "Sarathi-EDF", "QoServe"), recorded))
    return "\n\n".join(lines)


def paced(of: Figures | None) -> str:
    """Violations at that rate which only the pace of tokens made, of all requests: what the
    artifact does not count.
    """
    if of is None:
        return ""
    return f"{100 * sum(tier.violations.tbt for tier in of.by_tier.values()) / of.offered:.2f} %"


SECTION = Section(
    name="figure7",
    title="Figure 7: goodput of one replica",
    paper="The highest rate, in requests/s, at which at most 1 % of the requests are violated; three equal tiers (Table 3), runs of "
    "four hours. The claims: 1.5 to 2.4 times FCFS, 20 to 40 % over EDF.",
    hours=4,
    body=body,
    notes="""\
What differs: the published rates are the ends of ranges, not bars read off. The artifact has 12 runs per dataset; on code it tries FCFS
from 1.45 to 1.9, EDF from 2.45 to 2.9 and QoServe from 3.55 to 4 requests/s, and Table 5 of the paper puts EDF at 2.75 and QoServe at
3.65. The artifact takes the worst tier, not all requests together, for its 1 %, and counts no pace. For ShareGPT it gives its scheduler
55 ms a token and 150 tokens as the output to expect; here they are the 50 ms of Table 3 and what is learned.

What was tried: short runs, which flatter every policy that may put off Q3: over two minutes (`--only table5 --hours 0.03`) QoServe
carries 8.8 requests/s of code and EDF 6.6. So four hours it is, as in the paper.
""",
)
