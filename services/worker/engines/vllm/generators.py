"""Lets vLLM prefill seeded requests in chunks on a CPU. vLLM samples within a prompt, too, and
takes the draw back, which CPU generators cannot: here a row within its prompt does not draw.
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
