"""The pages of docs/ that are made of runs."""

from loadgen.lab.papers.adaserve import chapter as adaserve
from loadgen.lab.papers.ascendra import chapter as ascendra
from loadgen.lab.papers.job import PRECISION
from loadgen.lab.papers.matrix import which_policy
from loadgen.lab.papers.qoserve import chapter as qoserve
from loadgen.lab.papers.section import Page
from loadgen.lab.papers.slackline import chapter as slackline
from loadgen.lab.papers.slos_serve import chapter as slos_serve
from loadgen.lab.papers.sola import chapter as sola

RESULTS = Page(
    file="results.md",
    introduction=f"""\
# Results

The tables and figures of the papers, made again with `make results`
(`python -m loadgen.lab.papers`). The command above each table makes that table again. A table shows
what has been run; `not run` stands where a run is missing. [which-policy.md](which-policy.md) says
which policy suits which load.

- The figures are **simulated**, not measured on a GPU: Slackline's own cores run in virtual time
  without control latency ([simulator.md](simulator.md)). We do not have the papers' models and
  GPUs: where absolute rates differ, compare the ratios within one table.
- **Goodput**, or capacity, is found by bisection to {100 * PRECISION:g} %, with one seed: every
  rate has the same requests, with their gaps scaled.
- A figure counts as reproduced **within 15 %** of the published one; a percentage also counts
  within half a point of it.

No constant of a policy was chosen on the tables below, but for one: the quarter of the time that
Ascendra's relegated requests get, on its Figure 12.
""",
    chapters=(
        qoserve.CHAPTER,
        slos_serve.CHAPTER,
        sola.CHAPTER,
        adaserve.CHAPTER,
        ascendra.CHAPTER,
    ),
)

PAGES = (RESULTS, which_policy.PAGE, slackline.PAGE)
