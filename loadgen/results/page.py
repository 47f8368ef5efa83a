"""docs/results.md, from what the cache holds."""

from collections.abc import Mapping, Sequence

from loadgen.results.cache import Cache
from loadgen.results.job import PRECISION
from loadgen.results.run import CONTEXT_TOKENS, PROFILE, SEED
from loadgen.results.section import Lab, Section

HEAD = f"""# QoServe, reproduced

Made by `make results` (`python -m loadgen.results`); every table can be made again by the command above it. A table holds what has been
run; `not run` stands where nothing has.

- **Simulated**, not measured on a GPU: Slackline's own cores in virtual time without control latency ([simulator.md](simulator.md)), the
  profile `{PROFILE}`, which is the predictor that QoServe's authors published with their artifact. Published figures are of A100s.
- **Workloads** match the median and the 90th percentile that QoServe's Table 2 gives of each dataset (`loadgen/workload.py`): ShareGPT by
  the quantiles of the file that the authors used, Azure's code and conversations of 2024 by laws with two parameters, as that week is not
  at hand. Poisson arrivals, contexts of {CONTEXT_TOKENS:,} tokens, seed {SEED}.
- **A request is violated** by definition `deadline` ([QoServe Eq. 1 to 3]: every token by its own deadline) over all that were offered.
  The authors' artifact counts the first token of Q1 and the last of Q2 and Q3 and leaves the pace out.
- **QoServe** runs with alpha fixed at 8 ms a token where the load does not change (section 3.6), unless a table says otherwise.
- **Goodput** is found by bisection to {100 * PRECISION:g} %, one seed, the same requests with their gaps scaled at every rate.
- A figure counts as reproduced **within 15 %** of the published one; a percentage also within half a point of it.

No constant of a policy was chosen on the tables below.

Our QoServe follows the paper; where the artifact (branch `niyama_asplos2026` of microsoft/sarathi-serve) does otherwise:

| | here | artifact |
| --- | --- | --- |
| chunk | the largest that fits, to the token | one of ten sizes, 128 to 2,552 tokens with decodes; 128 whatever the slack |
| pace of decodes with a TTLT | the time until it, over the mean output left; 0.4 s a token at most | 0.4 s a token, back from TTLT |
| outputs to expect | learned: the mean, and mean + 2 sigma in Eq. 5 | a constant per run, off the deadline |
| relegated | whoever will be late | of those, who have not begun |
"""


def page(sections: Sequence[Section], cache: Cache, hours: Mapping[str, float]) -> str:
    """`hours`: of those sections whose runs are not as long as they state themselves."""
    return "\n".join((HEAD, *(part(section, cache, hours.get(section.name, section.hours)) for section in sections)))


def part(section: Section, cache: Cache, hours: float) -> str:
    lab = Lab(cache)
    body = section.body(lab, 3600 * hours)
    days = sorted({made.on for made in lab.used})
    when = "not run yet" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    command = f"python -m loadgen.results --only {section.name} --hours {hours:g}"
    facts = f"`{command}`\n\nProfile `{PROFILE}`, seed {SEED}, {hours:g} h of arrivals a run, definition `deadline`; {when}."
    return f"## {section.title}\n\n{section.paper}\n\n{facts}\n\n{body}\n\n{section.notes}"
