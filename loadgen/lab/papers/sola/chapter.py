"""The chapter on SOLA in docs/results.md."""

from loadgen.lab.papers.experiment import SEED
from loadgen.lab.papers.section import Chapter
from loadgen.lab.papers.sola import memory_ablation, tight_and_loose, ttft_tpot_plane

CHAPTER = Chapter(
    name="sola",
    title="SOLA",
    setup=f"""\
- **GPU**: the profile of the same model on the same GPU where there is one (Llama-3-8B on an A100,
  Llama-3-70B on four). Vicuna-7B-16k has the shape of Llama-2-7B. There is none for Qwen1.5.
- **Workloads**: two laws stand in for ShareGPT. `chatbot` is from SLOs-Serve's table;
  `sharegpt-first-turn` has the means of the sample that vLLM's serving benchmark draws, of first
  turns. In the longer conversations that QoServe drew from ShareGPT, 15 % of the prompts alone take
  longer than SOLA's tight TTFT. A placeholder stands in for LongBench; it supports no claim.
  Arrivals are Poisson, the seed is {SEED}.
- **A request is violated** by definition `mean-tpot`, over all that were offered.
- **Baselines**: vLLM-S is vLLM with SplitFuse, `vllm:max_num_batched_tokens=1024` (4,096 on long
  prompts). vLLM-D is the default of vLLM at that time, `vllm:mode=prefill_first`. SJF is vLLM-D
  with the shortest prompt first (section 6.1). *Sequences* is the most that a baseline runs at a
  time (`max_num_seqs`): 256, vLLM's default at that time, or no cap but the KV (for vLLM-S: the
  tokens of its chunk).
""",
    sections=(tight_and_loose.SECTION, ttft_tpot_plane.SECTION, memory_ablation.SECTION),
)
