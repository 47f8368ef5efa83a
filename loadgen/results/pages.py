"""The pages of docs/ that are made of runs."""

from loadgen.results import matrix
from loadgen.results.adaserve import sections as adaserve
from loadgen.results.ascendra import sections as ascendra
from loadgen.results.job import PRECISION
from loadgen.results.qoserve import sections as qoserve
from loadgen.results.section import Page
from loadgen.results.slos_serve import sections as slos_serve
from loadgen.results.sola import sections as sola

RESULTS = Page(
    file="results.md",
    head=f"""# Results

What the papers published, made again. Made by `make results` (`python -m loadgen.results`); every table can be made again by the command
above it. A table holds what has been run; `not run` stands where nothing has. Which policy suits which load:
[which-policy.md](which-policy.md).

- **Simulated**, not measured on a GPU: Slackline's own cores in virtual time without control latency ([simulator.md](simulator.md)). The
  papers' models and GPUs are not ours: where absolute rates differ, ratios within one table are what can be compared.
- **Goodput**, or capacity, is found by bisection to {100 * PRECISION:g} %, one seed, the same requests with their gaps scaled at every
  rate.
- A figure counts as reproduced **within 15 %** of the published one; a percentage also within half a point of it.

No constant of a policy was chosen on the tables below.
""",
    parts=(qoserve.PART, slos_serve.PART, sola.PART, adaserve.PART, ascendra.PART),
)

PAGES = (RESULTS, matrix.PAGE)
