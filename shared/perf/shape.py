"""The shape of a batch: the sums over it that every profile form is a function of."""

from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class BatchShape(NamedTuple):
    """One mixed batch. A chunk of `l_in` new tokens stands on `l_has` cached ones. A speculating
    decode counts as one. Its drafts count as new tokens on its context without a chunk's fixed cost
    (1.3 to 2.2 ms in our profiles), since one kernel verifies all trees. They also count as
    `drafts`, since each needs logits.
    """

    prefill_tokens: int = 0  # sum l_in
    prefills: int = 0  # chunks
    prefill_sq: float = 0.0  # sum l_in^2
    prefill_cross: float = 0.0  # sum l_has * l_in
    prefill_has: int = 0  # sum l_has
    decodes: int = 0
    decode_context: int = 0  # sum of the decodes' cached tokens
    drafts: int = 0  # that decodes verify; also among the prefill tokens

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    def with_drafts(self, drafts: NDArray[np.int32], has: NDArray[np.int32]) -> "BatchShape":
        """The shape with drafts to verify, by decode (of all or some); `has`: their contexts."""
        if not np.count_nonzero(drafts):
            return self
        tokens, stood = drafts.tolist(), has.tolist()
        drafted = sum(tokens)
        return BatchShape(
            self.prefill_tokens + drafted,
            self.prefills,
            self.prefill_sq + float(sum(n * n for n in tokens)),
            self.prefill_cross + float(sum(map(mul, tokens, stood))),
            self.prefill_has,
            self.decodes,
            self.decode_context,
            self.drafts + drafted,
        )

    def with_decodes(self, decodes: int, context: int) -> "BatchShape":
        """The shape with `decodes` more, which stand on `context` cached tokens together."""
        return BatchShape(
            self.prefill_tokens,
            self.prefills,
            self.prefill_sq,
            self.prefill_cross,
            self.prefill_has,
            self.decodes + decodes,
            self.decode_context + context,
            self.drafts,
        )

    def with_chunk(self, tokens: int, cached: int) -> "BatchShape":
        return BatchShape(
            self.prefill_tokens + tokens,
            self.prefills + 1,
            self.prefill_sq + tokens * tokens,
            self.prefill_cross + cached * tokens,
            self.prefill_has + cached,
            self.decodes,
            self.decode_context,
            self.drafts,
        )
