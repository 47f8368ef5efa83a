"""Holds vLLM's scheduler to one batch plan per iteration: sets its limits, then lets it schedule.

Blocks, prefix cache, sampling state and counts stay vLLM's. A request not in the plan asks for
nothing: its quota is 0, or, without KV, it is not in the queue. Quotas are checked against free
blocks, so vLLM never chooses a victim.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class Entry(NamedTuple):
    """Compute `tokens` more positions of a request; if it speculates, all but one are drafts."""

    request: Request
    tokens: int
    drafts: int = 0


# vllm is not installed where this is checked
class PlannedScheduler(Scheduler):  # type: ignore[misc]
    """The scheduler. `obey` before each step sets what the next `schedule` may do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.began_model_s = self.ended_model_s = 0.0
        # positions computed in the last iteration, without prefix-cache hits
        self.scheduled_tokens: Mapping[str, int] = {}
        self._quotas: dict[str, int] = {}
        # Both loops of `schedule` ask `_mamba_block_aligned_split` how many tokens a request gets.
        # Models with Mamba layers are refused.
        self.need_mamba_block_aligned_split = True
        # The drafts that vLLM makes at the end of a step, by batch size. Without this list it pads
        # the step of a request that enters with one token.
        self.dynamic_sd_lookup = [0] * (self.max_num_running_reqs + 1)

    def obey(self, entries: Sequence[Entry]) -> None:
        """Allows exactly these entries. Requests without KV enter in the order of the entries."""
        self._quotas = {entry.request.request_id: entry.tokens for entry in entries}
        for request, _, drafts in entries:
            del request.spec_token_ids[drafts:]
            if request.status != RequestStatus.RUNNING:
                self.waiting.add_request(request)

    def park(self, request: Request) -> None:
        """Registers a new request. It is in no queue until a plan names it."""
        self.add_request(request)
        self.withdraw(request)

    def withdraw(self, request: Request) -> None:
        """Removes a request whose grammar is still being compiled, so it could not enter."""
        self.waiting.remove_requests([request])
        if hasattr(self, "skipped_waiting"):  # up to 0.31
            self.skipped_waiting.remove_requests([request])
        if hasattr(self, "deferred_waiting"):  # from 0.32
            self.deferred_waiting.discard(request)

    def preempt(self, request: Request) -> None:
        """Frees the request's KV. Its tokens and its sampling state stay."""
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
