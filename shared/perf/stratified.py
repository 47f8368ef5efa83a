"""The profile that QoServe's authors published: linear fits of a batch's time, each for a range
(stratum) of the batch's tokens.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from shared.perf.inverse import largest_chunk
from shared.perf.shape import BatchShape
from shared.vocabulary import FromOne


class Stratum(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Intercept + a coefficient per feature, for up to `up_to_tokens` (None: no limit)."""

    up_to_tokens: FromOne | None
    intercept_s: float
    token_s: float
    prefill_token_s: float
    decode_token_s: float
    decode_context_s: float
    prefill_context_s: float


class _Piece(NamedTuple):
    """One stratum as it is evaluated. Per-token costs include `token_s`, and none is negative."""

    above: int
    up_to: float
    base_s: float
    prefill_token_s: float
    decode_token_s: float
    decode_context_s: float
    prefill_context_s: float


class StratifiedLinear(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="stratified_linear",
):
    """Strata by rising `up_to_tokens`, the last without a bound. Source: [qoserve] the authors'
    published predictor; deviation: see StratifiedProfile.
    """

    strata: Annotated[tuple[Stratum, ...], Meta(min_length=1)]

    def __post_init__(self) -> None:
        bounds = [s.up_to_tokens for s in self.strata]
        if bounds[-1] is not None or None in bounds[:-1]:
            raise ValueError("the last stratum, and only it, must have up_to_tokens null")
        inner = [b for b in bounds if b is not None]
        if inner != sorted(set(inner)):
            raise ValueError("up_to_tokens must rise")

    def profile(self, name: str, overhead_s: float) -> "StratifiedProfile":
        pieces, above = [], 0
        for s in self.strata:
            pieces.append(
                _Piece(
                    above,
                    float("inf") if s.up_to_tokens is None else s.up_to_tokens,
                    overhead_s + max(0.0, s.intercept_s),
                    max(0.0, s.token_s + s.prefill_token_s),
                    max(0.0, s.token_s + s.decode_token_s),
                    max(0.0, s.decode_context_s),
                    max(0.0, s.prefill_context_s),
                )
            )
            above = s.up_to_tokens or above
        return StratifiedProfile(name, tuple(pieces))


@dataclass(frozen=True, slots=True)
class StratifiedProfile:
    """The fit, made monotone: as published its time falls where a batch enters the next stratum,
    and with more decodes in the upper stratum.

    Every stratum that a batch reaches is evaluated, a lower one at its bound with the dearer tokens
    first, and the largest counts; negative costs count as free. On the published coefficients this
    changes batches of 513 to about 700 tokens, and larger ones by 14 us per decode.
    """

    name: str
    pieces: tuple[_Piece, ...]

    def batch_s(self, shape: BatchShape) -> float:
        prefill_tokens, _, _, _, prefill_has, decodes, decode_context, _ = shape
        tokens = prefill_tokens + decodes
        if not tokens:
            return 0.0
        longest_s = 0.0
        for (
            above,
            up_to,
            base_s,
            prefill_token_s,
            decode_token_s,
            decode_context_s,
            prefill_context_s,
        ) in self.pieces:
            if tokens <= above:
                break
            if tokens <= up_to:
                work_s = prefill_token_s * prefill_tokens + decode_token_s * decodes
            elif decode_token_s > prefill_token_s:
                counted = min(decodes, up_to)
                work_s = decode_token_s * counted + prefill_token_s * (up_to - counted)
            else:
                counted = min(prefill_tokens, up_to)
                work_s = prefill_token_s * counted + decode_token_s * (up_to - counted)
            total_s = (
                base_s
                + work_s
                + decode_context_s * decode_context
                + prefill_context_s * prefill_has
            )
            if total_s > longest_s:
                longest_s = total_s
        return longest_s

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        # The guess solves each stratum's line, and leaves out what `batch_s` does at the bounds.
        prefill_tokens, _, _, _, prefill_has, decodes, decode_context, _ = shape
        tokens, guess = prefill_tokens + decodes, max(limit, 0)
        for (
            above,
            up_to,
            base_s,
            prefill_token_s,
            decode_token_s,
            decode_context_s,
            prefill_context_s,
        ) in self.pieces:
            least = max(above - tokens, 0)
            if guess <= least:
                break
            batch_s = (
                base_s
                + prefill_token_s * prefill_tokens
                + decode_token_s * decodes
                + decode_context_s * decode_context
                + prefill_context_s * (prefill_has + cached)
            )
            left_s = max(budget_s - batch_s, 0.0)
            if left_s < prefill_token_s * min(guess, up_to - tokens):
                guess = max(int(left_s / prefill_token_s), least)
        return largest_chunk(self.batch_s, shape, cached, budget_s, limit, guess)
