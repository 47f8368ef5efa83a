"""Tests of the batch sizes that the torch engine records as CUDA graphs, and pads batches to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from services.worker.engines.torch.attention.padded_rows import LONGEST_RUN
from services.worker.engines.torch.recorded_passes import (
    MOST_TOKENS,
    USUAL_LONGEST,
    fits,
    size_of,
    usual_sizes,
)

rows = st.lists(st.integers(1, LONGEST_RUN), min_size=1, max_size=600)


@given(rows=rows, seen=st.integers(1, 100_000))
def test_a_size_holds_the_batch_and_its_padding(rows: list[int], seen: int) -> None:
    tokens = sum(rows)
    size = size_of(tokens, len(rows), max(rows), seen)
    assert size.tokens >= tokens
    assert size.runs.runs >= len(rows)
    assert size.runs.width >= max(rows)
    assert size.runs.longest >= seen
    if size.tokens > tokens:  # what is no token of the batch has a run to itself
        assert size.runs.runs > len(rows)


@given(
    rows=rows.filter(lambda rows: sum(rows) <= MOST_TOKENS),
    seen=st.integers(1, USUAL_LONGEST),
    most=st.integers(1, 100_000),
)
def test_nothing_usual_is_recorded_while_requests_are_served(
    rows: list[int], seen: int, most: int
) -> None:
    """`most`: the most positions that a sequence of this engine has."""
    size = size_of(sum(rows), len(rows), max(rows), min(seen, most))
    assert size in set(usual_sizes(most)) or not fits(size)


@given(decodes=st.integers(1, MOST_TOKENS), seen=st.integers(1, 200_000))
def test_a_pass_of_decodes_alone_is_recorded_at_the_start_whatever_their_contexts(
    decodes: int, seen: int
) -> None:
    size = size_of(decodes, decodes, 1, seen)
    assert size in set(usual_sizes(seen)) or not fits(size)
