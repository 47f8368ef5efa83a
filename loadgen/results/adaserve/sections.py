"""What docs/results.md has of AdaServe."""

from loadgen.results.adaserve import rate as adaserve_rate
from loadgen.results.adaserve import scale as adaserve_scale
from loadgen.results.adaserve import share as adaserve_share
from loadgen.results.adaserve import shift as adaserve_shift
from loadgen.results.adaserve.systems import DRAFT, PROFILE
from loadgen.results.experiment import SEED
from loadgen.results.section import Part
from loadgen.simulator.simulation import ACCEPTANCE

PART = Part(
    name="adaserve",
    title="AdaServe",
    head=f"""\
- **GPU**: the profile `{PROFILE}`, the paper's larger model on its GPUs. A decode alone takes 31.7 ms by it; the authors'
  artifact says 30.
- **Draft**: 1.24 billion parameters on one GPU, 70.6 over four, so an iteration of it takes {100 * DRAFT:g} % of the target's: what each
  GPU reads, and computes for a token, are as these. {100 * ACCEPTANCE:g} % of its first tokens are accepted, which is a guess: the paper
  has no figure. Candidate trees come from a seeded law whose path probabilities are what they say. A draft that is verified costs what a
  token of a prompt does, but no chunk of its own.
- **Workload** `adaserve`: prompts by mean and deviation of those in the artifact's traces (HumanEval 133 tokens, Alpaca 18, CNN/DailyMail
  779), and always the 256 tokens of output that every request there asks for. **Arrivals** are Poisson under the artifact's rate over time
  (Figure 7, cut from Azure's trace of 2023) in twelve steps. Seed {SEED}.
- **AdaServe** has the artifact's depths, width and limits for this model, and 128 tokens as its budget, which is what the profile says;
  the artifact has 512, for eight GPUs.
- **Baselines** as the artifact starts them: vLLM and vLLM-Spec(n) prefill whole prompts first, Sarathi has chunks of 2,048 tokens.
- **A request is violated** by definition `mean-tpot` over all that were offered; there is no TTFT.
""",
    sections=(
        adaserve_rate.SECTION,
        adaserve_share.SECTION,
        adaserve_scale.SECTION,
        adaserve_shift.SECTION,
    ),
)
