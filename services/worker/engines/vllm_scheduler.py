"""vLLM's scheduler, held to one batch plan per iteration: constrained, then delegated to.

What may be computed, and for whom, is the plan's; blocks, prefix cache, sampling state and the
books of computed tokens stay vLLM's. Who is not planned this time is shown to vLLM as someone who
asks for nothing: a running request has a quota of 0, one without KV is not in the queue. Since
quotas are checked against free blocks beforehand, vLLM never has to choose a victim.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class Entry(NamedTuple):
    """Compute so many more positions of a request (`tokens` - 1 of them drafts, where it
    speculates).
    """

    request: Request
    tokens: int
    drafts: int = 0


class PlannedScheduler(Scheduler):  # type: ignore[misc]  # vllm is not installed where this is checked
    """`obey` before each step says what the next `schedule` may do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began_model_s = self.ended_model_s = 0.0
        # of the last iteration: what was computed, prefix-cache hits apart
        self.scheduled_tokens: Mapping[str, int] = {}
        self._quotas: dict[str, int] = {}
        self._depth = _Depth()
        # Both loops of `schedule` ask `_mamba_block_aligned_split` how many tokens a request gets.
        # Models with Mamba layers are refused.
        self.need_mamba_block_aligned_split = True
        if self.num_spec_tokens:
            self.dynamic_sd_lookup = self._depth  # how many drafts to make at the end of the step

    def obey(self, entries: Sequence[Entry], *, depth: int = 0) -> None:
        """Allow just this. Requests without KV enter in the order of the entries. `depth`: drafts
        to make for the step after.
        """
        self._quotas = {entry.request.request_id: entry.tokens for entry in entries}
        self._depth.tokens = depth
        for request, _, drafts in entries:
            del request.spec_token_ids[drafts:]
            if request.status != RequestStatus.RUNNING:
                self.waiting.add_request(request)

    def park(self, request: Request) -> None:
        """Know a new request; it is in no queue until a plan names it."""
        self.add_request(request)
        self.withdraw(request)

    def withdraw(self, request: Request) -> None:
        """Out of the queue again: it was to enter and could not, because its grammar is still being
        compiled.
        """
        self.waiting.remove_requests([request])
        if hasattr(self, "skipped_waiting"):  # up to 0.31
            self.skipped_waiting.remove_requests([request])
        if hasattr(self, "deferred_waiting"):  # from 0.32
            self.deferred_waiting.discard(request)

    def preempt(self, request: Request) -> None:
        """Its KV goes; its tokens, and the state it is sampled with, stay."""
        self.running.remove(request)
        self._preempt_request(request, time.monotonic())
        self.withdraw(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        assert output.num_scheduled_tokens.keys() <= self._quotas.keys(), (
            "vLLM ran what was not planned"
        )
        self.scheduled_tokens = output.num_scheduled_tokens
        self.began_model_s = time.monotonic()
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Mapping[int, Any]:
        self.ended_model_s = time.monotonic()
        outputs: Mapping[int, Any] = super().update_from_output(*args, **kwargs)
        return outputs

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *_: int) -> int:
        return min(num_new_tokens, self._quotas.get(request.request_id, 0))


class _Depth:
    """Where vLLM looks a batch size up and finds how many drafts to make."""

    def __init__(self) -> None:
        self.tokens = 0

    def __getitem__(self, batch: int) -> int:
        return self.tokens
