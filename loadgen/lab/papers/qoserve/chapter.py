"""The chapter on QoServe in docs/results.md."""

from loadgen.lab.papers.experiment import CONTEXT_TOKENS, PROFILE, SEED
from loadgen.lab.papers.qoserve import control_latency as latency
from loadgen.lab.papers.qoserve import (
    figure7,
    figure7_70b,
    figure8,
    figure10,
    figure12,
    figure14,
    figure15a,
    figure15b,
    other_slos,
    table4,
    table5,
    table6,
)
from loadgen.lab.papers.section import Chapter

CHAPTER = Chapter(
    name="qoserve",
    title="QoServe",
    setup=f"""\
- **GPU**: the profile `{PROFILE}` where a table names no other. It is the predictor
  that QoServe's authors published with their artifact. Published figures are of A100s.
- **Workloads** match the median and the 90th percentile that QoServe's Table 2 gives of each
  dataset (`loadgen/load/workload.py`). ShareGPT has the quantiles of the file that the authors
  used. Azure's code and conversations of 2024 are laws with two parameters, as that week is not at
  hand. Arrivals are Poisson, contexts have {CONTEXT_TOKENS:,} tokens, the seed is {SEED}.
- **A request is violated** by definition `deadline` ([QoServe Eq. 1 to 3]: every token has its own
  deadline), over all that were offered. The authors' artifact counts the first token of Q1 and the
  last token of Q2 and Q3, and leaves the pace out.
- **QoServe** runs with alpha fixed at 8 ms a token where the load does not change (section 3.6),
  unless a table says otherwise.

Our QoServe follows the paper. The artifact (branch `niyama_asplos2026` of microsoft/sarathi-serve)
differs from it as follows:

| | here | artifact |
| --- | --- | --- |
| chunk | the largest that fits, to the token | one of ten sizes, 128 to 2,552 tokens with decodes; 128 whatever the slack |
| pace of decodes with a TTLT | the time until it, over the mean output left; 0.4 s a token at most | 0.4 s a token, back from TTLT |
| expected output | learned: the mean, and mean + 2 sigma in Eq. 5 | a constant per run, subtracted from the deadline |
| relegated requests | those that will be late | those that will be late and have not begun |
""",  # noqa: E501 - a table
    sections=(
        figure7.SECTION,
        figure7_70b.SECTION,
        table4.SECTION,
        table5.SECTION,
        table6.SECTION,
        other_slos.SECTION,
        figure8.SECTION,
        figure10.SECTION,
        figure12.SECTION,
        figure14.SECTION,
        figure15a.SECTION,
        figure15b.SECTION,
        latency.SECTION,
    ),
)
