"""What an iteration's time depends on: the sums over its batch that every profile form is a function of."""

from typing import NamedTuple


class BatchShape(NamedTuple):
    """One mixed batch. A prefill chunk of `l_in` new tokens stands on `l_has` cached ones.

    Verified draft tokens count as prefill-like work: a speculating decode with n tokens is a chunk of n on its context.
    """

    prefill_tokens: int = 0  # sum l_in
    prefills: int = 0  # chunks
    prefill_sq: float = 0.0  # sum l_in^2
    prefill_cross: float = 0.0  # sum l_has * l_in
    prefill_has: int = 0  # sum l_has
    decodes: int = 0
    decode_context: int = 0  # sum of the decodes' cached tokens

    @property
    def tokens(self) -> int:
        return self.prefill_tokens + self.decodes

    def with_chunk(self, tokens: int, cached: int) -> "BatchShape":
        """The shape with one more prefill chunk."""
        return BatchShape(
            self.prefill_tokens + tokens,
            self.prefills + 1,
            self.prefill_sq + tokens * tokens,
            self.prefill_cross + cached * tokens,
            self.prefill_has + cached,
            self.decodes,
            self.decode_context,
        )
