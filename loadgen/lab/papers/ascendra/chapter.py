"""The chapter on Ascendra in docs/results.md."""

from loadgen.lab.papers.ascendra import (
    elastic_batches,
    memory_starved,
    overload,
    pool_mix,
    slo_scale,
)
from loadgen.lab.papers.ascendra.systems import CHUNKS
from loadgen.lab.papers.experiment import SEED
from loadgen.lab.papers.section import Chapter

CHAPTER = Chapter(
    name="ascendra",
    title="Ascendra",
    setup=f"""\
- **GPU**: three replicas of `a100-llama3-8b`, for Llama-3.1-8B and Mistral-7B, which are alike in
  shape; `a100-qwen-14b` for Qwen-14B.
- **Workloads**: the ShareGPT file of QoServe, with long conversations, stands in for
  Openchat-ShareGPT4. A placeholder stands in for LongBench; it supports no claim. Arrivals are
  Poisson, the seed is {SEED}.
- **A request is violated** by definition `mean-tpot`, over all that were offered. Goodput is the
  rate at which a tenth are violated.
- **Baselines**: vLLM is `vllm:mode=prefill_first`. Sarathi is `fcfs`; the paper does not state its
  chunk, so each row names one of {", ".join(CHUNKS)}. A baseline that *drops* has `drop_late=true`:
  it drops what waits past its deadline, as all systems of section 8.6. Requests go to replicas in
  turn. SLOs are those of Mistral-7B and Llama-3.1-8B on ShareGPT: 1 s, 0.15 s.
- **Ascendra** relegates a request that has waited past its deadline, and runs it where the others
  leave room; `overload=drop` is the paper's section 8.6.
""",
    sections=(
        pool_mix.SECTION,
        memory_starved.SECTION,
        slo_scale.SECTION,
        elastic_batches.SECTION,
        overload.SECTION,
    ),
)
