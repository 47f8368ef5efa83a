"""The chapter on AdaServe in docs/results.md."""

from loadgen.lab.papers.adaserve import rate as adaserve_rate
from loadgen.lab.papers.adaserve import scale as adaserve_scale
from loadgen.lab.papers.adaserve import share as adaserve_share
from loadgen.lab.papers.adaserve import shift as adaserve_shift
from loadgen.lab.papers.adaserve.systems import LLAMA, QWEN
from loadgen.lab.papers.experiment import SEED
from loadgen.lab.papers.section import Chapter
from loadgen.simulator.deployment import ACCEPTANCE

CHAPTER = Chapter(
    name="adaserve",
    title="AdaServe",
    setup=f"""\
- **GPUs**: the profile `{LLAMA.profile}` for Llama-3.1-70B. By it a decode alone takes
  31.7 ms; the authors' artifact states 30. `{QWEN.profile}` for Qwen2.5-32B is by analysis:
  nothing of this model was measured. By it a decode alone takes 27.1 ms, and 128, 256, 512 and
  1,024 tokens take 38, 53, 91 and 180 ms. The artifact states 28, and 48, 66, 104 and 188, for
  four A100s of 40 GB.
- **Drafts**: Llama-3.2-1B has 1.24 billion parameters on one GPU, beside 70.6 over four. So a step
  of it, and a prompt token that it reads, take {100 * LLAMA.draft:g} % of the target's: reads and
  compute per GPU and token are in this proportion. For Qwen2.5-0.5B, 0.494 billion beside 32.76
  over two, it is {100 * QWEN.draft:g} %. {100 * ACCEPTANCE:g} % of the first tokens are accepted,
  which is a guess: the paper has no figure. Candidate trees come from a seeded law whose path
  probabilities are exact. A draft that is verified costs as much as a prompt token, without a chunk
  of its own.
- **Without CUDA graphs** (rows that say so): section 5.2 has AdaServe replay its draft's steps as
  CUDA graphs, and does not say what vLLM does. A draft whose kernels are launched one by one takes
  0.56 ms a layer here: a decode of Llama-2-70B, 80 layers, took 45 ms on A100s in Splitwise's
  published measurements, on four as on eight. That is {100 * LLAMA.eager[0]:g} % of the target's
  time for the 16 layers of Llama-3.2-1B, {100 * QWEN.eager[0]:g} % for the 24 of Qwen2.5-0.5B.
  Their software was of 2023, and ran on several GPUs: a draft alone on one may be faster. The
  artifact tells AdaServe that a whole speculation takes 70 ms for Llama, of 8 steps at most, and 35
  ms for Qwen, of 5: 9 and 7 ms a step. Ours without graphs take 9 and 14 ms, with them 2 and 1.
- **Workload** `adaserve`: prompts have the mean and deviation of those in the artifact's traces
  (HumanEval 133 tokens, Alpaca 18, CNN/DailyMail 779); outputs have the 256 tokens that every
  request there asks for. **Arrivals** are Poisson at the artifact's rate over time (Figure 7, cut
  from Azure's trace of 2023), in twelve steps. The seed is {SEED}.
- **AdaServe** has the artifact's D_max, width and most requests for each model. Its budget is 128
  tokens, which the profiles give; the artifact has 512 for Llama, 256 for Qwen. So D_min is scaled:
  the artifact's 4 for Llama is 512 // 96 - 1, the depth that Eq. 8 gives with as many requests as
  may run, and never binds. Here that rule gives 1. (For Qwen it gives 2 there, and the artifact has
  3.) n_max is 1.2 mean shares of what the roots leave of the budget, as in the artifact.
- **Baselines** are as the artifact starts them: vLLM and vLLM-Spec(n) prefill whole prompts first,
  Sarathi has chunks of 2,048 tokens.
- **A request is violated** by definition `mean-tpot`, over all that were offered; there is no TTFT.
""",
    sections=(
        adaserve_rate.SECTION,
        adaserve_share.SECTION,
        adaserve_scale.SECTION,
        adaserve_shift.SECTION,
        adaserve_rate.QWEN_SECTION,
    ),
)
