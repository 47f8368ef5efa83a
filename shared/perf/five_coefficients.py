"""Ascendra's formula of an iteration's time, with five coefficients: moving bytes and computing."""

from dataclasses import dataclass

from shared.perf.inverse import largest_chunk
from shared.perf.shape import BatchShape


@dataclass(frozen=True, slots=True)
class AscendraProfile:
    """c1*(tM + tF) + c2*max(tM, tF) + c3*tM + c4*tF + c5, per GPU, with the constants folded.

        tM = (weight_bytes + kv_bytes_per_token*(decode context + sum(l_has + l_in))) / hbm
        tF = (2*params*T + 4*layers*q_heads*head_width*pairs) / peak_flops
        pairs = sum(l_has*l_in) + sum(l_in^2)/2 + decode context

    Source: [ascendra], its performance model; deviation: tM leaves out the activations of Eq. 7
    and 8, and what Eq. 8 reads again for each block of queries. No coefficient is negative, which
    makes the form monotone.
    """

    name: str
    both: float  # c2
    memory: float  # c1 + c3
    compute: float  # c1 + c4
    base_s: float  # c5
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
