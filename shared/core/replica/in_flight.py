"""A plan that was sent and is not yet acked, with the effects that the request table assumes."""

from dataclasses import dataclass

import numpy as np

from shared.columns import Indices, Ints, pack
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools
from shared.schemas import Selection


@dataclass(slots=True)
class InFlightPlan:
    """Columns run along the plan's entries."""

    seq: int
    slots: Indices
    packed_slots: bytes  # as they are in the plan and, if all ran, in the ack
    computed: Ints  # KV positions that each entry is predicted to fill for good
    emitted: Ints  # tokens that each is predicted to make
    makers: Indices  # the slots that make these tokens
    unsure: Ints  # tokens that each may make beyond those
    selection: Selection | None
    draft_caps: Ints  # positions that each may fill in the draft model's KV; 0: it does not draft
    caps: Ints  # KV positions that each may fill while it runs, rejected drafts included
    asked: Ints  # `caps` as the plan was sent
    has: Ints  # KV positions of each request before the plan
    decode: Bools
    firsts: Bools  # entries that make their request's first token
    restarts: Ints  # table.restarts when the plan was sent
    shape: BatchShape
    draft_s: float
    load_s: float  # for what comes back from the host's memory
    # the draft model has nothing of some request that drafts: it reads the whole context, or finds
    # a part of that in its cache
    draft_begins: bool
    predicted_s: float
    end_unix_s: float  # predicted
    # sent while another plan was with the worker: a longer lead would have brought it sooner
    follows: bool
    dropped_blocks: int  # blocks of the requests that its orders release and preempt
    dropped_draft_blocks: int  # the same in the draft model's KV
    # positions of `computed` that each entry is expected to find in a prefix cache; None: none
    expected: Ints | None = None
    reshaped: bool = False  # its shape has changed since its time was predicted

    @property
    def cached(self) -> bytes:
        """The column of its ack if the cache has what is expected."""
        return b"" if self.expected is None else pack(self.expected)

    def predict_entry(
        self, entry: int, has: int, computed: int, emitted: int, decode: bool
    ) -> None:
        """Replace the prediction of one entry."""
        # until now both may be one array
        self.computed, self.caps = self.computed.copy(), self.caps.copy()
        self.has[entry] = has
        self.computed[entry] = computed
        self.emitted[entry] = emitted
        self.makers = self.slots[self.emitted > 0]
        self.decode[entry] = decode
        if not self.unsure[entry]:
            self.caps[entry] = computed
        if self.selection is None:
            found = 0 if self.expected is None else self.expected
            self.shape = shape_of(self.has + found, self.computed - found, self.decode)
            self.reshaped = True


def shape_of(has: Ints, tokens: Ints, decode: Bools) -> BatchShape:
    """The shape of entries that compute `tokens` after `has` positions; a decode's tokens beyond
    the first are drafts to be verified.
    """
    decodes = int(np.count_nonzero(decode))
    if decodes == len(decode):
        shape = BatchShape(decodes=decodes, decode_context=sum(has.tolist()))
        return shape.with_drafts(tokens - 1, has)
    chunks = (~decode).nonzero()[0]
    l_in, l_has = tokens[chunks].tolist(), has[chunks].tolist()
    prefill_tokens, prefill_has = sum(l_in), sum(l_has)
    shape = BatchShape(
        prefill_tokens,
        len(l_in),
        float(sum(n * n for n in l_in)),
        float(sum(n * cached for n, cached in zip(l_in, l_has, strict=True))),
        prefill_has,
        decodes,
        int(has.sum()) - prefill_has,
    )
    if int(tokens.sum()) == prefill_tokens + decodes:
        return shape
    return shape.with_drafts(tokens[decode] - 1, has[decode])
