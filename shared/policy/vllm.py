"""A policy that imitates vLLM's own scheduler, the baseline of SLOs-Serve, SOLA, AdaServe and
Ascendra, in both of its behaviours. It knows no SLO.

`mode=chunked`, its present default (V1): all decodes, then the prefills that have begun, then new
prefills in order of arrival, in chunks, until `max_num_batched_tokens` are in the iteration. Where
a decode needs KV and there is none, other requests are preempted and computed again later. No
request begins in such an iteration.

`mode=prefill_first`, the default until 2025 (V0; "vLLM-D" in SOLA, whose "vLLM-S" is the other mode
with 1,024 tokens, "vLLM" in SLOs-Serve and Ascendra): while a prompt waits that the KV can hold,
the iteration is whole prompts in order of arrival, up to `max_num_batched_tokens`, without decodes.
Otherwise it is all decodes.

Both run at most `max_num_seqs` requests. The limits are vLLM's on an A100, or any GPU of less than
70 GiB, behind its HTTP server (`EngineArgs.get_batch_defaults`): 2,048 tokens and 256 requests. On
other large GPUs they are 8,192 and 1,024. With prefills first, the limit is the context, if that is
more tokens.

`spec_tokens=n` is AdaServe's vLLM-Spec(n) (section 6.1): every decode drafts n tokens in line,
whatever the load. It has no effect without a draft model.

Where this differs from vLLM:
- *KV* goes by the rules of shared/policy/chunk.py. In chunks, vLLM begins a prompt when its first
  chunk fits; here all of it must fit, so that fewer requests are preempted. vLLM preempts the
  request that began last; here prefills go before decodes, then the latest arrived.
- *A prompt longer than* `max_num_batched_tokens` is refused by V0; here it runs alone.
- *Watermark*: with prefills first, 1 % of the KV stays free, as in V0. Swapping to the host is left
  out: V0, too, recomputes by default.
- *Drafts that the KV cannot hold* are not made; vLLM preempts for them.
- *Prefix caching* is left out: no workload here shares prefixes. *Priorities* are left out: the
  default is first come, first served.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from shared.columns import Ints
from shared.errors import ConfigError
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.overdue import dropping, past_due
from shared.policy.seam import Admission, Choice, Declared, Observation, Speculation, View
from shared.routing.routings import RouterName
from shared.schemas import Offer
from shared.vocabulary import MOST_DRAFTS

BATCHED_TOKENS = 2048
WATERMARK = 0.01  # of the KV


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["chunked", "prefill_first"] = "chunked"
    # None: vLLM's own limit, see above
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_num_seqs: Annotated[int, Meta(ge=1)] = 256
    # order of requests that have not begun; `sjf`, by prompt, is SOLA's baseline (section 6.1)
    order: Literal["fcfs", "sjf"] = "fcfs"
    spec_tokens: Annotated[int, Meta(ge=0, le=MOST_DRAFTS)] = 0
    # requests that wait past their deadline, as Ascendra compares (its section 8.6)
    drop_late: bool = False
    router: RouterName = "attainable"


class Vllm:
    """The policy. It learns nothing."""

    name = "vllm"

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError where not all decodes fit one iteration. vLLM refuses that, too."""
        most = settings.max_num_batched_tokens
        if most is not None and most < settings.max_num_seqs:
            raise ConfigError(
                f"policy vllm: max_num_batched_tokens {most} is less than "
                f"max_num_seqs {settings.max_num_seqs}"
            )
        self._set = settings
        self.declared = Declared(drops=settings.drop_late)

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        if not self._set.drop_late:
            return [self._batch(view, self._queue(view))]
        late, queue = past_due(view), self._queue(view)
        queue = queue[~np.isin(queue, late)]
        choice = self._batch(view, queue)
        return [dropping(view, choice, late) if len(queue) + len(late) else choice]

    def _batch(self, view: View, queue: Rows) -> Choice:
        if self._set.mode == "prefill_first":
            alone = self._prefills(view, queue) if len(queue) else None
            return alone or self._with_decodes(view, queue[:0], limit_tokens=0)
        limit_tokens = self._set.max_num_batched_tokens or BATCHED_TOKENS
        return self._with_decodes(view, queue, limit_tokens=limit_tokens)

    def _queue(self, view: View) -> Rows:
        """The rows that may be prefilled, in order of arrival: those that have begun, and as many
        others as may run beside all running requests.
        """
        rows = (~view.in_decode).nonzero()[0]
        waits = view.phase[rows] != chunk.PREFILL
        running = view.rows - int(np.count_nonzero(waits))
        shortest = view.prompt_tokens[rows] * (waits & (self._set.order == "sjf"))
        rows = chunk.in_order(view, rows, view.best_effort[rows], waits, shortest)
        new = np.cumsum(view.phase[rows] != chunk.PREFILL)
        queue: Rows = rows[new <= max(self._set.max_num_seqs - running, 0)]
        return queue

    def _prefills(self, view: View, queue: Rows) -> Choice | None:
        """An iteration of whole prompts alone; None where no prompt can begin."""
        most = self._set.max_num_batched_tokens or max(BATCHED_TOKENS, view.context_tokens)
        total = np.cumsum(view.target_tokens[queue] - view.computed_tokens[queue])
        count = max(1, int(np.searchsorted(total, most, side="right")))
        # an empty replica keeps nothing free, so that a request that needs all of the KV can run
        kept = int(WATERMARK * view.kv_blocks) if view.kv_free_blocks < view.kv_blocks else 0
        none = Decoding(queue[:0], queue[:0], view.kv_free_blocks - kept, BatchShape())
        choice = chunk.fill(view, none, queue[:count], limit_tokens=int(total[count - 1]))
        return choice if len(choice.slots) else None

    def _with_decodes(self, view: View, queue: Rows, *, limit_tokens: int) -> Choice:
        decodes = chunk.decoding(view)
        if len(decodes.victims):
            queue = queue[view.phase[queue] == chunk.PREFILL]
        drafts, blocks = self._drafts(view, decodes)
        decodes = decodes._replace(free_blocks=decodes.free_blocks - blocks)
        verified = len(decodes.rows) + int(drafts.sum())
        choice = chunk.fill(view, decodes, queue, limit_tokens=limit_tokens - verified, steady=True)
        return _speculating(choice, drafts) if drafts.any() else choice

    def _drafts(self, view: View, decodes: Decoding) -> tuple[Ints, int]:
        """[decodes] the number of tokens that each drafts, and the blocks for all of them. No
        decode drafts past its end, and none drafts at all where KV is short.
        """
        rows = decodes.rows
        drafts = np.zeros(len(rows), dtype=np.int32)
        if view.draft is None or self._set.spec_tokens == 0 or len(decodes.victims):
            return drafts, 0
        left = view.max_tokens[rows] - view.generated_tokens[rows] - view.unsure_tokens[rows] - 1
        drafts = np.clip(left, 0, min(self._set.spec_tokens, view.deepest)).astype(np.int32)
        upper = view.top_tokens[rows] + 1
        held = np.maximum(-(-upper // view.block_tokens), view.kv_held_blocks[rows])
        blocks = int(np.maximum(-(-(upper + drafts) // view.block_tokens) - held, 0).sum())
        return (drafts, blocks) if blocks <= decodes.free_blocks else (np.zeros_like(drafts), 0)

    def observe(self, seen: Observation) -> None:
        pass


def _speculating(choice: Choice, drafts: Ints) -> Choice:
    """The same entries, with `drafts` drafts in line for each decode; the decodes come first."""
    entries, n = len(choice.slots), len(drafts)
    depth = np.zeros(entries, dtype=np.int32)
    depth[:n] = drafts
    caps = choice.caps.copy()
    caps[:n] += drafts
    verified = int(drafts.sum()) + int(np.count_nonzero(drafts))
    return replace(
        choice,
        caps=caps,
        speculation=Speculation(
            method="chain", depth=depth, width=np.minimum(depth, 1), budget_tokens=verified
        ),
        repeats=1,
    )
