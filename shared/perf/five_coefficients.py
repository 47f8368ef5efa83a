"""Ascendra's five-coefficient form: it mixes the time to move the bytes and the time to compute."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from shared.perf.inverse import largest_chunk
from shared.perf.shape import BatchShape

NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]


class Ascendra(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="form",
    tag="ascendra_5coef",
):
    """c1*(tM + tF) + c2*max(tM, tF) + c3*tM + c4*tF + c5, per GPU.

        tM = (weight_bytes + kv_bytes_per_token*(decode context + sum(l_has + l_in))) / hbm
        tF = (2*params*T + 4*layers*q_heads*head_width*pairs) / peak_flops
        pairs = sum(l_has*l_in) + sum(l_in^2)/2 + decode context

    Source: [ascendra], its performance model; deviation: none. No coefficient is negative, which
    makes the form monotone.
    """

    c1: NotNegative
    c2: NotNegative
    c3: NotNegative
    c4: NotNegative
    c5: NotNegative
    hbm: Positive  # bytes/s
    peak_flops: Positive  # 1/s
    weight_bytes: NotNegative
    kv_bytes_per_token: NotNegative
    params: NotNegative
    layers: NotNegative
    q_heads: NotNegative
    head_width: NotNegative

    def profile(self, name: str, overhead_s: float) -> "AscendraProfile":
        return AscendraProfile(
            name,
            both=self.c2,
            memory=self.c1 + self.c3,
            compute=self.c1 + self.c4,
            base_s=self.c5 + overhead_s,
            weights_s=self.weight_bytes / self.hbm,
            kv_token_s=self.kv_bytes_per_token / self.hbm,
            token_s=2 * self.params / self.peak_flops,
            pair_s=4 * self.layers * self.q_heads * self.head_width / self.peak_flops,
        )


@dataclass(frozen=True, slots=True)
class AscendraProfile:
    """The same form with its constants folded."""

    name: str
    both: float
    memory: float
    compute: float
    base_s: float
    weights_s: float
    kv_token_s: float
    token_s: float
    pair_s: float  # per query-key pair

    def batch_s(self, shape: BatchShape) -> float:
        prefill_tokens, _, prefill_sq, prefill_cross, prefill_has, decodes, decode_context, _ = (
            shape
        )
        tokens = prefill_tokens + decodes
        if not tokens:
            return 0.0
        memory_s = self.weights_s + self.kv_token_s * (
            decode_context + prefill_has + prefill_tokens
        )
        compute_s = self.token_s * tokens + self.pair_s * (
            prefill_cross + 0.5 * prefill_sq + decode_context
        )
        return (
            self.both * max(memory_s, compute_s)
            + self.memory * memory_s
            + self.compute * compute_s
            + self.base_s
        )

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return largest_chunk(self.batch_s, shape, cached, budget_s, limit)
