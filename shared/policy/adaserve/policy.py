"""AdaServe (arXiv 2501.12162): each request verifies the draft tokens that its own pace needs; then
the likeliest drafts of all requests fill the budget.

An iteration is Algorithm 2: speculate, select toward each request's SLO, select for throughput,
verify. The planner fixes depth, width and budget one plan ahead (tree.py). The worker computes the
needs when the iteration begins (shared/policy/need.py), drafts, selects by `slo_then_throughput`
(shared/policy/speculation.py) and verifies.

Where the paper leaves room, or serves less than we do (more in the files named):
- *Prefill*: the paper only says that it costs. The authors' artifact runs chunked prefill, and so
  do we: chunks of the prompts share the pass that verifies, in order of arrival, with up to
  `max_batch_tokens` in all. B1 stays the same beside them.
- *Values*: D_max, width and the most requests at once are what the artifact passes for Llama-70B
  with a 1B draft; D_min follows from the budget, as its value there does; c1 and c2, which the
  authors found by grid search and did not publish, are 0.
- *t_spec* is what the profile predicts for this very iteration: drafting, and a pass that spends
  the budget evenly.
- *Admission*: all that fits. Nobody is relegated or dropped; a request whose SLO is lost keeps the
  largest A(r), up to d + 1.
- *Memory*: KV is held for every candidate that may be verified. Where it is short, drafts get only
  what their requests' last blocks have left, and preemption follows shared/policy/chunk.py.
- *An engine that verifies only chains* (vLLM): width 1, and no deeper than its longest chain.
- *No draft model*: all decodes, one token each.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from shared.columns import Ints
from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.adaserve.tree import Bounds, Tree, balanced_tokens, least_depth, tree
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.seam import Admission, Choice, Declared, Observation, Speculation, View
from shared.policy.speculation import draft_rows_s
from shared.routing.routings import RouterName
from shared.schemas import Offer
from shared.vocabulary import MOST_DRAFTS

Count = Annotated[int, Meta(ge=1)]
Drafts = Annotated[int, Meta(ge=1, le=MOST_DRAFTS)]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    depth_max: Drafts = 8  # D_max, W_max: the artifact, Llama-70B
    depth_min: Drafts | None = None  # D_min; None: from the budget (tree.py)
    width_max: Drafts = 3
    c1: Annotated[int, Meta(ge=0)] = 0
    c2: int = 0
    budget_tokens: Count | None = None  # B1; None: from the profile
    max_batch_tokens: Count = 1024  # the artifact: verified tokens and prefill chunks together
    max_requests: Count = 96  # the artifact: decoding or in prefill at once
    router: RouterName = "attainable"


class AdaServe:
    """The policy. It learns nothing: the view holds all."""

    name = "adaserve"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        """Raises: ConfigError where the bounds cross."""
        if settings.depth_min is not None and settings.depth_min > settings.depth_max:
            raise ConfigError(
                f"policy adaserve: depth_min {settings.depth_min} is more than "
                f"depth_max {settings.depth_max}"
            )
        self._set = settings
        self._budgets: dict[str, int] = {}

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        decodes = chunk.decoding(view)
        n = len(decodes.rows)
        grown = None if view.draft is None or not n else self._tree(view, n)
        verified = (
            n if grown is None else min(grown.budget_tokens, n * (1 + grown.depth * grown.width))
        )
        queue = self._queue(view, decodes)
        choice = chunk.fill(
            view, decodes, queue, limit_tokens=self._set.max_batch_tokens - verified
        )
        if grown is None:
            return [choice]
        of_chunk = view.slot[queue] == choice.slots[n:, None]
        prefills = queue[of_chunk.any(axis=0)]  # in the order of the choice
        return [self._speculating(view, decodes, prefills, choice, grown)]

    def _tree(self, view: View, requests: int) -> Tree | None:
        given, balanced = self._set, self._balanced(view.profile)
        budget_tokens = given.budget_tokens or balanced
        depth_max, width_max = given.depth_max, given.width_max
        if view.longest_chain:
            depth_max, width_max = min(depth_max, view.longest_chain), 1
        depth_min = given.depth_min or least_depth(budget_tokens, given.max_requests, depth_max)
        bounds = Bounds(depth_max, min(depth_min, depth_max), width_max, given.c1, given.c2)
        return tree(requests, budget_tokens, balanced, bounds)

    def _balanced(self, profile: Profile) -> int:
        """The balanced batch of this profile, remembered by its name: corrections scale the whole
        curve, which moves nothing.
        """
        if profile.name not in self._budgets:
            self._budgets[profile.name] = balanced_tokens(profile)
        return self._budgets[profile.name]

    def _queue(self, view: View, decodes: Decoding) -> Rows:
        """Prefills by arrival, best-effort ones last. At most `max_requests` run at once."""
        queue: Rows = (~view.in_decode).nonzero()[0]
        if not len(queue):
            return queue
        queue = chunk.in_order(view, queue, view.best_effort[queue])
        begun = view.phase[queue] == chunk.PREFILL
        room = self._set.max_requests - len(decodes.rows) - int(np.count_nonzero(begun))
        kept: Rows = queue[begun | (np.cumsum(~begun) <= room)]
        return kept

    def _speculating(
        self, view: View, decodes: Decoding, prefills: Rows, choice: Choice, grown: Tree
    ) -> Choice:
        """The same choice, with decodes that draft."""
        rows, n = decodes.rows, len(decodes.rows)
        chunks = choice.caps[n:]
        has, unsure = view.computed_tokens[rows], view.unsure_tokens[rows]
        left = view.max_tokens[rows] - view.generated_tokens[rows]
        # with all drafts accepted, the pass still adds a token of its own
        depth = np.minimum(grown.depth, left - 1)
        wanted = 1 + np.minimum(depth * grown.width, grown.budget_tokens - n)
        # the core holds no KV past a request's end
        wanted = np.maximum(np.minimum(wanted, left - unsure), 1)
        verified = _within_kv(view, decodes, prefills, chunks, has + unsure, wanted)
        drafting = (verified > 1).nonzero()[0]
        if not len(drafting):
            return replace(choice, repeats=1)
        depth[verified <= 1] = 0
        width = np.full(n, grown.width, dtype=np.int32)
        drafted_s = draft_rows_s(view, rows, depth, width)
        total = min(grown.budget_tokens, int(verified.sum()))
        iteration_s = drafted_s + view.profile.batch_s(
            _pass(total, has, chunks, view.computed_tokens[prefills])
        )
        undrafted = np.zeros(len(prefills), dtype=np.int32)
        speculation = Speculation(
            method="slo_then_throughput",
            depth=np.concatenate((depth, undrafted)),
            width=np.concatenate((width, undrafted + 1)),
            # the decodes that do not draft verify their root only
            budget_tokens=grown.budget_tokens - (n - len(drafting)),
            needed_limit_tokens=grown.needed_limit_tokens,
            lasts_s=iteration_s,
        )
        return replace(
            choice, caps=np.concatenate((verified, chunks)), speculation=speculation, repeats=1
        )

    def observe(self, seen: Observation) -> None:
        pass


def _within_kv(
    view: View, decodes: Decoding, prefills: Rows, chunks: Ints, context: Ints, wanted: Ints
) -> Ints:
    """[decodes] the wanted tokens; where not all fit the KV, the tokens that need no more blocks
    than a plain decode. `context`: [decodes] tokens, those that are unsure included.
    """
    bt, held = view.block_tokens, view.kv_held_blocks

    def newly(rows: Rows, tokens: Ints) -> int:
        return int(np.maximum(-(-tokens // bt) - held[rows], 0).sum())

    free_blocks = view.kv_free_blocks
    if len(decodes.victims):
        free_blocks += int(held[decodes.victims].sum())
    if len(prefills):
        before = view.top_tokens[prefills]
        free_blocks -= newly(prefills, before + chunks)
    if newly(decodes.rows, context + wanted) <= free_blocks:
        return wanted
    plain_blocks = np.maximum(context // bt + 1, held[decodes.rows])
    fits: Ints = np.minimum(wanted, plain_blocks * bt - context)
    return fits


def _pass(verified: int, has: Ints, chunks: Ints, cached: Ints) -> BatchShape:
    """The pass that verifies `verified` tokens, spread evenly over requests with contexts `has`,
    and runs these prefill chunks.
    """
    drafts = (verified - len(has)) / len(has)
    context = int(has.sum())
    l_in, l_has = chunks.astype(np.int64), cached.astype(np.int64)
    return BatchShape(
        prefill_tokens=verified - len(has) + int(l_in.sum()),
        prefills=len(chunks),
        prefill_sq=drafts * drafts * len(has) + float((l_in * l_in).sum()),
        prefill_cross=drafts * context + float((l_in * l_has).sum()),
        prefill_has=int(l_has.sum()),
        decodes=len(has),
        decode_context=context,
        drafts=verified - len(has),
    )
