"""Published formulas of an iteration's duration: a curve over the batch's tokens plus terms for
attention. Coefficients are in seconds, as profile files hold them.

Symbols: T tokens of the batch; P, D 1 when it has any prefill or decode; per prefill chunk l_in new
tokens on l_has cached ones; n decodes with ctx cached tokens in all, and the drafts that they
verify.

Fits are not always monotone (a table wiggles), but a planner inverts them, and is better early than
late. So a curve becomes its running maximum over tokens, a negative coefficient 0.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Annotated

from msgspec import Meta, Struct

from shared.perf.additive import AdditiveProfile
from shared.vocabulary import Count, FromOne

# The longest batch in the table. Beyond it the curve continues with the form's last slope.
CURVE_TOKENS = 8192
# A profile comes from a worker, and its curve is unfolded to a value for each count of tokens, by
# each of its knots. These limits bound the memory and the time for that.
MOST_TABLE_TOKENS = 32_768
MOST_KNOTS = 32

TableTokens = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=MOST_TABLE_TOKENS)], ...], Meta(min_length=2)
]
TableSeconds = Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=2)]


def _rising(
    curve_s: Callable[[int], float], overhead_s: float, tokens: int = CURVE_TOKENS
) -> tuple[float, ...]:
    """The running maximum of a curve over 0..tokens, with the overhead added."""
    return tuple(
        overhead_s + seconds
        for seconds in accumulate((curve_s(t) for t in range(tokens + 1)), max, initial=0.0)
    )[1:]


class SlosServeRoofline(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="slos_serve_roofline",
):
    """max(k1a*T + b_a, k1b*T + b_b). Source: [slos-serve]; deviation: no draft steps."""

    k1a: float
    b_a: float
    k1b: float
    b_b: float

    def profile(self, name: str, overhead_s: float) -> AdditiveProfile:
        curve_s = _rising(
            lambda t: max(self.k1a * t + self.b_a, self.k1b * t + self.b_b), overhead_s
        )
        return AdditiveProfile(name, curve_s, max(self.k1a, self.k1b, 0.0))


class SolaPolynomial(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="sola_polynomial",
):
    """P(a0*sum(l_has*l_in) + b0*sum(l_in^2) + c0*sum(l_in) + d0) + D(a1*n + b1*ctx + c1). Source:
    [sola] Eq. 3, 4; deviation: none.
    """

    a0: float
    b0: float
    c0: float
    d0: float
    a1: float
    b1: float
    c1: float

    def profile(self, name: str, overhead_s: float) -> AdditiveProfile:
        return AdditiveProfile(
            name,
            _rising(lambda _: 0.0, overhead_s),
            0.0,
            prefills_s=max(0.0, self.d0),
            prefill_token_s=max(0.0, self.c0),
            prefill_sq_s=max(0.0, self.b0),
            prefill_cross_s=max(0.0, self.a0),
            decodes_s=max(0.0, self.c1),
            decode_s=max(0.0, self.a1),
            decode_context_s=max(0.0, self.b1),
        )


class Attention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """e*chunks + p1*sum(l_has*l_in) + p2*sum(l_in^2) + D*d0 + d1*n + d2*ctx + v*drafts. A draft
    costs `v` more than a token of a prompt: it needs logits, from which a token is drawn.
    """

    e: float
    p1: float
    p2: float
    d0: float
    d1: float
    d2: float
    v: float = 0.0

    def over(self, name: str, curve_s: tuple[float, ...], beyond_s: float) -> AdditiveProfile:
        return AdditiveProfile(
            name,
            curve_s,
            beyond_s,
            prefill_s=max(0.0, self.e),
            prefill_sq_s=max(0.0, self.p2),
            prefill_cross_s=max(0.0, self.p1),
            decodes_s=max(0.0, self.d0),
            decode_s=max(0.0, self.d1),
            decode_context_s=max(0.0, self.d2),
            draft_s=max(0.0, self.v),
        )


class PiecewiseTokens(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="piecewise_tokens_plus_attention",
):
    """c + sum_j slopes_j*max(0, Tq - knots_j) + attention. Tq: T rounded up to whole `tile`s."""

    tile: FromOne
    knots: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MOST_KNOTS)]
    slopes: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MOST_KNOTS)]
    c: float
    attention: Attention

    def __post_init__(self) -> None:
        if len(self.knots) != len(self.slopes):
            raise ValueError("knots and slopes must be equally many")

    def profile(self, name: str, overhead_s: float) -> AdditiveProfile:
        def curve_s(t: int) -> float:
            rounded = -(-t // self.tile) * self.tile
            return self.c + sum(
                slope * max(0, rounded - knot)
                for knot, slope in zip(self.knots, self.slopes, strict=True)
            )

        # The line beyond lies up to a tile below the steps: the curve ends one tile higher.
        end = CURVE_TOKENS + self.tile
        curve = _rising(lambda t: curve_s(t if t < CURVE_TOKENS else end), overhead_s)
        return self.attention.over(name, curve, max(0.0, sum(self.slopes)))


class TokenTable(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="token_table_plus_attention",
):
    """The table at T, linear between points, + attention. Past its end the table goes on with the
    steeper of its last and its mean slope.
    """

    table_tokens: TableTokens
    table_seconds: TableSeconds
    attention: Attention

    def __post_init__(self) -> None:
        if len(self.table_tokens) != len(self.table_seconds):
            raise ValueError("table_tokens and table_seconds must be equally many")
        if any(b <= a for a, b in zip(self.table_tokens, self.table_tokens[1:], strict=False)):
            raise ValueError("table_tokens must rise")

    def profile(self, name: str, overhead_s: float) -> AdditiveProfile:
        tokens, seconds = self.table_tokens, self.table_seconds
        curve_s = [seconds[0]] * (tokens[0] + 1)
        for i in range(1, len(tokens)):
            step_s = (seconds[i] - seconds[i - 1]) / (tokens[i] - tokens[i - 1])
            curve_s += [
                seconds[i - 1] + step_s * t for t in range(1, tokens[i] - tokens[i - 1])
            ] + [seconds[i]]
        beyond_s = max(0.0, step_s, (seconds[-1] - seconds[0]) / (tokens[-1] - tokens[0]))
        curve_s += [seconds[-1] + beyond_s * t for t in range(1, CURVE_TOKENS - tokens[-1] + 1)]
        return self.attention.over(
            name, _rising(curve_s.__getitem__, overhead_s, len(curve_s) - 1), beyond_s
        )
