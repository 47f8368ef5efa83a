"""The chapter on AdaServe in docs/results.md."""

from loadgen.results.adaserve import rate as adaserve_rate
from loadgen.results.adaserve import scale as adaserve_scale
from loadgen.results.adaserve import share as adaserve_share
from loadgen.results.adaserve import shift as adaserve_shift
from loadgen.results.adaserve.systems import DRAFT, PROFILE
from loadgen.results.experiment import SEED
from loadgen.results.section import Chapter
from loadgen.simulator.deployment import ACCEPTANCE

CHAPTER = Chapter(
    name="adaserve",
    title="AdaServe",
    setup=f"""\
- **GPU**: the profile `{PROFILE}`, the paper's larger model on its GPUs. By it a decode alone takes
  31.7 ms; the authors' artifact states 30.
- **Draft**: 1.24 billion parameters on one GPU, beside 70.6 over four, so an iteration of it takes
  {100 * DRAFT:g} % of the target's: reads and compute per GPU and token are in this proportion.
  {100 * ACCEPTANCE:g} % of its first tokens are accepted, which is a guess: the paper has no
  figure. Candidate trees come from a seeded law whose path probabilities are exact. A draft that is
  verified costs as much as a prompt token, without a chunk of its own.
- **Workload** `adaserve`: prompts have the mean and deviation of those in the artifact's traces
  (HumanEval 133 tokens, Alpaca 18, CNN/DailyMail 779); outputs have the 256 tokens that every
  request there asks for. **Arrivals** are Poisson at the artifact's rate over time (Figure 7, cut
  from Azure's trace of 2023), in twelve steps. The seed is {SEED}.
- **AdaServe** has the artifact's depths, width and limits for this model. Its budget is 128 tokens,
  which the profile gives; the artifact has 512, for eight GPUs.
- **Baselines** are as the artifact starts them: vLLM and vLLM-Spec(n) prefill whole prompts first,
  Sarathi has chunks of 2,048 tokens.
- **A request is violated** by definition `mean-tpot`, over all that were offered; there is no TTFT.
""",
    sections=(
        adaserve_rate.SECTION,
        adaserve_share.SECTION,
        adaserve_scale.SECTION,
        adaserve_shift.SECTION,
    ),
)
