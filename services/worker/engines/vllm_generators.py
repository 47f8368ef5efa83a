"""Seeded requests in chunks, on a CPU.

vLLM samples for every request of a batch, also for one whose prompt goes on in the next chunk, and
takes back what its generator drew there. Generators of a CPU take nothing back: they raise. So here
they draw nothing there.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def keep_generators(worker: Any) -> None:
    """Called in each process of vLLM's that has a part of the model: rows that sample nothing are
    sampled without their generators.
    """
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
