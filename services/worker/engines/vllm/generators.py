"""Seeded requests in chunks, on a CPU. vLLM samples for every request, also within a prompt, and
takes back what its generator drew, which CPU generators cannot. So here they do not draw for such a
request.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def keep_generators(worker: Any) -> None:
    """Called in each vLLM process: rows that sample nothing are sampled without generators."""
    runner = worker.model_runner
    sample: Callable[..., Any] = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist()
        kept = {row: batch.generators.pop(row) for row in unfinished if row in batch.generators}
        try:
            return sample(*args, **kwargs)
        finally:
            batch.generators.update(kept)

    runner.sample_tokens = sample_tokens
