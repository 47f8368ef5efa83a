"""Tests of SOLA's prediction of output lengths (section 4.3) and of peak memory (section 5.1)."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.seam import Ended, Floats
from shared.policy.sola.output_lengths import BIN_TOKENS, FADE_ENDS, MIN_ENDS, LengthDistributions
from shared.policy.sola.peak_memory import PeakMemory


def lefts(lengths: LengthDistributions, prompt: int, most: int, *generated: int) -> list[float]:
    """The tokens that requests are predicted to make yet, by what they have made."""
    n = len(generated)
    columns = (
        np.full(n, prompt, np.int32),
        np.full(n, most, np.int32),
        np.array(generated, dtype=np.int32),
    )
    return lengths.left(*columns).tolist()


def test_a_class_with_few_ends_takes_those_of_all_and_before_any_the_most_there_can_be() -> None:
    lengths = LengthDistributions()
    assert lefts(lengths, 100, 500, 0, 120) == [500.0, 380.0]
    for _ in range(MIN_ENDS - 1):
        lengths.observe(Ended("a", 100, 500, 100))
    assert lefts(lengths, 100, 500, 0) == [500.0]
    lengths.observe(Ended("a", 4000, 500, 200))
    assert lefts(lengths, 4000, 500, 0) == pytest.approx([110.0])
    assert lefts(lengths, 100, 500, 320) == [180.0]  # longer than all that ended


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)), max_size=4 * MIN_ENDS
    ),
    st.integers(1, 3),
    st.integers(0, 12),
)
def test_what_is_left_is_by_the_mean_of_those_of_the_class_that_were_longer(
    ended: list[tuple[int, int, int]], prompt: int, bins: int
) -> None:
    lengths = LengthDistributions()
    for of_prompt, of_most, output in ended:
        lengths.observe(Ended("a", 2**of_prompt, 2 ** (10 + of_most), output * BIN_TOKENS))
    outputs = [o * BIN_TOKENS for p, m, o in ended if (p, m) == (prompt, 1)]
    if len(outputs) < MIN_ENDS:
        outputs = [o * BIN_TOKENS for _, _, o in ended]
    at, most = bins * BIN_TOKENS, 2**11
    longer = [o for o in outputs if o >= at] if len(outputs) >= MIN_ENDS else []
    left = max(sum(longer) / len(longer) - at, 1.0) if longer else most - at
    assert lefts(lengths, 2**prompt, most, at) == [left]


def test_old_lengths_fade() -> None:
    lengths = LengthDistributions()
    for n in range(6 * FADE_ENDS):
        lengths.observe(Ended("a", 100, 500, 100 if n < FADE_ENDS else 300))
    assert 290 < lefts(lengths, 100, 500, 0)[0] < 300


requests = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 60)), min_size=1, max_size=12)


def peak_blocks(memory: PeakMemory, block_tokens: int) -> int:
    """The peak with one more that holds nothing and adds nothing, not even a block's waste."""
    return int(memory.with_one(np.array([1.0 - block_tokens]), np.zeros(1))[0])


def true_peak_blocks(held: Sequence[tuple[int, int]], block_tokens: int) -> int:
    """The peak, by running them: each grows by a token an iteration until it has ended."""
    most = 0
    for step in range(max(left for _, left in held) + 1):
        most = max(
            most, sum(-(-(has + step) // block_tokens) for has, left in held if step <= left)
        )
    return most


@given(held=requests, block_tokens=st.sampled_from([1, 4, 16]))
def test_the_predicted_peak_is_never_below_what_happens_and_above_it_by_less_than_a_block_each(
    held: list[tuple[int, int]], block_tokens: int
) -> None:
    has, left = (np.array(column, dtype=np.float64) for column in zip(*held, strict=True))
    predicted, true = (
        peak_blocks(PeakMemory(has, left, block_tokens), block_tokens),
        true_peak_blocks(held, block_tokens),
    )
    assert true <= predicted < true + len(held)
    if block_tokens == 1 or len(held) == 1:
        assert predicted == true


@given(held=requests, more=requests)
def test_one_more_is_predicted_as_if_it_had_been_there(
    held: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    def columns(rows: Sequence[tuple[int, int]]) -> tuple[Floats, Floats]:
        return np.array([r[0] for r in rows], dtype=np.float64), np.array(
            [r[1] for r in rows], dtype=np.float64
        )

    memory = PeakMemory(*columns(held), 16)
    alone = [peak_blocks(PeakMemory(*columns([*held, one]), 16), 16) for one in more]
    assert memory.with_one(*columns(more)).tolist() == alone
    for has, left in more:
        memory.add(has, left)
    assert peak_blocks(memory, 16) == peak_blocks(PeakMemory(*columns([*held, *more]), 16), 16)
