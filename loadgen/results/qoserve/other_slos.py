"""QoServe section 4.4.2: goodput with other SLOs."""

from msgspec.structs import replace

from loadgen.results.job import Search
from loadgen.results.qoserve.systems import LABELS, run
from loadgen.results.ratios import compare_lead, ratio
from loadgen.results.section import Results, Section, compare, table
from shared.tiers import Tier, TierSet
from shared.vocabulary import Slo

TIERS = TierSet(
    name="qoserve-other-slos",
    default="Q1",
    tiers={
        "Q1": Tier(slo=Slo(ttft_s=3.0, tbt_s=0.05), share=1 / 3),
        "Q2": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05), share=1 / 3),
        "Q3": Tier(slo=Slo(ttlt_s=1000.0), share=1 / 3),
    },
)
PUBLISHED = {"edf": 3.7, "qoserve": 5.0}


def render(results: Results, duration_s: float) -> str:
    rates = {}
    for policy, published in PUBLISHED.items():
        alone = replace(run(policy, "azure-conv", published, duration_s), tiers=TIERS)
        found = results.capacity(Search(run=alone))
        rates[policy] = None if found is None else found.rate_rps
    rows = [
        (LABELS[policy], *compare(published, rates[policy]))
        for policy, published in PUBLISHED.items()
    ]
    lead = PUBLISHED["qoserve"] / PUBLISHED["edf"]
    cells = compare_lead(round(lead, 2), ratio(rates["qoserve"], rates["edf"]))
    rows.append(("QoServe over Sarathi-EDF", *cells))
    return table(("goodput, requests/s", "published", "ours", "ratio", ""), rows)


SECTION = Section(
    name="other-slos",
    title="Section 4.4.2: other SLOs",
    paper="""\
The conversation workload with a TTFT of 3 s and 6 s, both at a TBT of 50 ms, and a TTLT of 1,000 s,
a third of the requests each.""",
    hours=2,
    render=render,
    discussion="",
)
