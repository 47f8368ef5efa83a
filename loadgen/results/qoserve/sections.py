"""What docs/results.md has of QoServe."""

from loadgen.results.experiment import CONTEXT_TOKENS, PROFILE, SEED
from loadgen.results.qoserve import control_latency as latency
from loadgen.results.qoserve import (
    figure7,
    figure8,
    figure10,
    figure12,
    figure15b,
    table4,
    table5,
    table6,
)
from loadgen.results.section import Part

PART = Part(
    name="qoserve",
    title="QoServe",
    head=f"""\
- **GPU**: the profile `{PROFILE}`, which is the predictor that QoServe's authors published with their artifact. Published figures are of
  A100s.
- **Workloads** match the median and the 90th percentile that QoServe's Table 2 gives of each dataset (`loadgen/load/workload.py`): ShareGPT by
  the quantiles of the file that the authors used, Azure's code and conversations of 2024 by laws with two parameters, as that week is not
  at hand. Poisson arrivals, contexts of {CONTEXT_TOKENS:,} tokens, seed {SEED}.
- **A request is violated** by definition `deadline` ([QoServe Eq. 1 to 3]: every token by its own deadline) over all that were offered.
  The authors' artifact counts the first token of Q1 and the last of Q2 and Q3 and leaves the pace out.
- **QoServe** runs with alpha fixed at 8 ms a token where the load does not change (section 3.6), unless a table says otherwise.

Our QoServe follows the paper; where the artifact (branch `niyama_asplos2026` of microsoft/sarathi-serve) does otherwise:

| | here | artifact |
| --- | --- | --- |
| chunk | the largest that fits, to the token | one of ten sizes, 128 to 2,552 tokens with decodes; 128 whatever the slack |
| pace of decodes with a TTLT | the time until it, over the mean output left; 0.4 s a token at most | 0.4 s a token, back from TTLT |
| outputs to expect | learned: the mean, and mean + 2 sigma in Eq. 5 | a constant per run, off the deadline |
| relegated | whoever will be late | of those, who have not begun |
""",
    sections=(
        figure7.SECTION,
        table4.SECTION,
        table5.SECTION,
        table6.SECTION,
        figure8.SECTION,
        figure10.SECTION,
        figure12.SECTION,
        figure15b.SECTION,
        latency.SECTION,
    ),
)
