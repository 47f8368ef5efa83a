"""Profiles (the seconds of a batch) that add terms to a curve over tokens; forms.py makes them."""

from dataclasses import dataclass

from shared.perf.inverse import largest_chunk
from shared.perf.shape import BatchShape


@dataclass(frozen=True, slots=True)
class AdditiveProfile:
    """curve(tokens) + the terms below. `curve_s`: the curve at 0, 1, 2, ... tokens, with the
    overhead, made monotone when built. No term is negative, so all is monotone in every sum.
    """

    name: str
    curve_s: tuple[float, ...]
    beyond_s: float  # per token past the end of the curve
    prefills_s: float = 0.0  # once per batch with any prefill
    prefill_s: float = 0.0  # per chunk
    prefill_token_s: float = 0.0
    prefill_sq_s: float = 0.0  # per new token squared
    prefill_cross_s: float = 0.0  # per new token and cached token
    decodes_s: float = 0.0  # once per batch with any decode
    decode_s: float = 0.0  # per decode
    decode_context_s: float = 0.0  # per cached token of the decodes
    draft_s: float = 0.0  # per draft that decodes verify

    def batch_s(self, shape: BatchShape) -> float:
        prefill_tokens, prefills, prefill_sq, prefill_cross, _, decodes, context, drafts = shape
        tokens = prefill_tokens + decodes
        if not tokens:
            return 0.0
        curve_s = self.curve_s
        total_s = (
            curve_s[tokens]
            if tokens < len(curve_s)
            else curve_s[-1] + (tokens - len(curve_s) + 1) * self.beyond_s
        )
        if decodes:
            total_s += (
                self.decodes_s
                + self.decode_s * decodes
                + self.decode_context_s * context
                + self.draft_s * drafts
            )
        if prefill_tokens:
            total_s += (
                self.prefills_s
                + self.prefill_s * prefills
                + self.prefill_token_s * prefill_tokens
                + self.prefill_sq_s * prefill_sq
                + self.prefill_cross_s * prefill_cross
            )
        return total_s

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        prefill_tokens, prefills, prefill_sq, prefill_cross, _, decodes, context, drafts = shape
        curve_s, tokens = self.curve_s, prefill_tokens + decodes
        if tokens + limit >= len(curve_s):
            return largest_chunk(self.batch_s, shape, cached, budget_s, limit)
        left_s = budget_s - (
            self.prefills_s
            + self.prefill_s * (prefills + 1)
            + self.prefill_token_s * prefill_tokens
            + self.prefill_sq_s * prefill_sq
            + self.prefill_cross_s * prefill_cross
        )
        if decodes:
            left_s -= (
                self.decodes_s
                + self.decode_s * decodes
                + self.decode_context_s * context
                + self.draft_s * drafts
            )
        token_s, sq_s = self.prefill_token_s + self.prefill_cross_s * cached, self.prefill_sq_s
        fits, exceeds = 0, limit + 1
        if limit > 0 and curve_s[tokens + limit] + (token_s + sq_s * limit) * limit <= left_s:
            fits = limit  # as most prompts do
        while exceeds - fits > 1:
            middle = (fits + exceeds) >> 1
            if curve_s[tokens + middle] + (token_s + sq_s * middle) * middle <= left_s:
                fits = middle
            else:
                exceeds = middle
        # batch_s groups the sum differently, so the last bit may differ; the answer must truly fit.
        while fits > 0 and self.batch_s(shape.with_chunk(fits, cached)) > budget_s:
            fits -= 1
        return fits
