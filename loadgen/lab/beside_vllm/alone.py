"""vLLM alone, as an operator runs it.

It has its own scheduler and an engine core in a process of its own; each request is one `generate`.
"""

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from loadgen.load.mix import PlannedRequest
from loadgen.load.tally import Outcome
from shared.client.client import Now
from shared.vocabulary import FinishReason

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The threads are those of OMP_NUM_THREADS, on both sides.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
# vLLM serves the lowest number first: the tightest SLO.
PRIORITIES: Mapping[str, int] = {"interactive": 0, "summary": 1, "batch": 2}


class VllmSender:
    """Sends each request to `AsyncLLM.generate`. Answers have the length of the plan."""

    def __init__(
        self,
        engine: Any,
        clock: Now,
        prompts: Callable[[PlannedRequest], list[int]],
        *,
        by_priority: bool,
    ) -> None:
        self._engine, self._clock, self._prompts, self._by_priority = (
            engine,
            clock,
            prompts,
            by_priority,
        )

    async def send(self, outcome: Outcome) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        planned = outcome.planned
        params = SamplingParams(
            temperature=0.0,
            max_tokens=planned.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        priority = PRIORITIES[planned.tier] if self._by_priority else 0
        prompt = {"prompt_token_ids": self._prompts(planned)}
        async for output in self._engine.generate(
            prompt, params, f"load-{planned.number}", priority=priority
        ):
            tokens = sum(len(part.token_ids) for part in output.outputs)
            outcome.emit(tokens, self._clock.unix_s())
        outcome.end(FinishReason.LENGTH)


@asynccontextmanager
async def vllm_alone(folder: Path, arguments: Mapping[str, Any]) -> AsyncIterator[Any]:
    """An AsyncLLM that is ready. It is shut down at the end."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(folder), disable_log_stats=True, **arguments)
    )
    try:
        yield engine
    finally:
        engine.shutdown()
