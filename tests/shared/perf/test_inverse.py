"""The inverse of a profile: a guess saves time and changes nothing."""

from hypothesis import given
from hypothesis import strategies as st

from shared.perf.inverse import largest_chunk
from shared.perf.profile_file import load
from shared.perf.shape import BatchShape

STRATIFIED = load("a100-llama3-8b-qoserve")


@given(
    decodes=st.integers(0, 700),
    prefill_tokens=st.integers(0, 700),
    cached=st.integers(0, 3_000),
    budget_s=st.floats(-0.01, 0.6),
    limit=st.integers(-1, 4_096),
    share=st.floats(0, 1),
)
def test_the_largest_chunk_is_the_same_with_any_guess(
    decodes: int, prefill_tokens: int, cached: int, budget_s: float, limit: int, share: float
) -> None:
    shape = BatchShape(prefill_tokens, decodes=decodes, decode_context=300 * decodes)
    plain = largest_chunk(STRATIFIED.batch_s, shape, cached, budget_s, limit)
    guess = int(share * max(limit, 0))
    assert largest_chunk(STRATIFIED.batch_s, shape, cached, budget_s, limit, guess) == plain
    assert STRATIFIED.prefill_budget(shape, cached, budget_s, limit) == plain
    fits = [
        tokens
        for tokens in range(1, limit + 1)
        if STRATIFIED.batch_s(shape.with_chunk(tokens, cached)) <= budget_s
    ]
    assert plain == len(fits)
