"""Zero-load times: those of a single request on a replica. SLOs may be multiples of them."""

from typing import NamedTuple

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.vocabulary import Slo

CHUNK_TOKENS = 2048  # the chunks in which a single request's prompt is computed


class ZeroLoad(NamedTuple):
    """The times of a single request: to its first token, between tokens, to its last token."""

    ttft_s: float
    tbt_s: float
    ttlt_s: float


def ttft_s(profile: Profile, prompt_tokens: int, chunk_tokens: int) -> float:
    """Seconds of the prompt's chunks one after another; the last one emits the first token."""
    total_s = 0.0
    for cached in range(0, prompt_tokens, chunk_tokens):
        total_s += profile.batch_s(
            BatchShape().with_chunk(min(chunk_tokens, prompt_tokens - cached), cached)
        )
    return total_s


def tbt_s(profile: Profile, prompt_tokens: int, output_tokens: int) -> float:
    """Seconds of the mean decode iteration after the first token; for an output of one token, of a
    second one. This is the mean of only the first and the last decode, since outputs can be a
    million tokens long: exact where time is linear in the context, too high where it is convex. All
    shipped forms are one or the other.
    """
    first_s = profile.batch_s(BatchShape(decodes=1, decode_context=prompt_tokens))
    last_s = profile.batch_s(
        BatchShape(decodes=1, decode_context=prompt_tokens + max(0, output_tokens - 2))
    )
    return (first_s + last_s) / 2


def zero_load(
    profile: Profile, prompt_tokens: int, output_tokens: int, chunk_tokens: int
) -> ZeroLoad:
    """All three times; chunks and outputs have at least 1 token. Takes about 1 us per chunk."""
    first_s = ttft_s(profile, prompt_tokens, chunk_tokens)
    between_s = tbt_s(profile, prompt_tokens, output_tokens)
    return ZeroLoad(first_s, between_s, first_s + (output_tokens - 1) * between_s)


def in_seconds(slo: Slo, profile: Profile, prompt_tokens: int, max_tokens: int) -> Slo:
    """The SLO of a request of these lengths, with its multiples of zero-load time in seconds."""
    if not slo.in_multiples:
        return slo
    alone = zero_load(profile, prompt_tokens, max_tokens, CHUNK_TOKENS)
    return slo.resolved(
        zero_load_ttft_s=alone.ttft_s, zero_load_tbt_s=alone.tbt_s, zero_load_ttlt_s=alone.ttlt_s
    )
