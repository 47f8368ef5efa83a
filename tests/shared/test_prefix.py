"""Tests of chains of block hashes."""

from collections.abc import Sequence
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from shared.prefix import CHAIN_TOKENS, Piece, chain_of, chain_of_pieces, extend, pieces_of_ids


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of elements with which both begin."""
    pairs = zip(one, other, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_chains_are_alike_for_as_many_full_blocks_as_texts(common: int, a: int, b: int) -> None:
    begin = [n % 50 for n in range(common)]
    one, other = [*begin, *[100] * a], [*begin, *[101] * b]
    assert alike(chain_of(one), chain_of(other)) == common // CHAIN_TOKENS
    assert len(chain_of(one)) == len(one) // CHAIN_TOKENS
    grown: list[int] = []
    for end in range(0, len(one) + 1, 37):
        extend(grown, one[:end])
    extend(grown, one)
    assert tuple(grown) == chain_of(one)


def test_a_block_counts_only_behind_the_same_blocks_and_with_the_same_salt() -> None:
    ones, twos = [1] * CHAIN_TOKENS, [2] * CHAIN_TOKENS
    assert alike(chain_of(ones + twos), chain_of(twos + twos)) == 0
    assert not set(chain_of(ones + twos)) & set(chain_of(twos + twos))
    assert not set(chain_of(ones, b"a")) & set(chain_of(ones, b"b"))


def spelt(pieces: Sequence[Piece]) -> list[int]:
    return [n for piece, tokens in pieces for n in Random(piece).choices(range(99999), k=tokens)]


PIECES = st.lists(st.builds(Piece, st.integers(0, 3), st.integers(1, 200)), max_size=6)


@given(PIECES, PIECES)
def test_chains_of_pieces_are_alike_where_those_of_their_tokens_are(
    one: list[Piece], other: list[Piece]
) -> None:
    by_tokens = alike(chain_of(spelt(one)), chain_of(spelt(other)))
    assert len(chain_of_pieces(one)) == len(chain_of(spelt(one)))
    assert alike(chain_of_pieces(one), chain_of_pieces(other)) == by_tokens


def test_equal_ids_in_equal_position_give_equal_chains() -> None:
    def chain_of_ids(ids: list[int], prompt_tokens: int) -> tuple[int, ...]:
        return chain_of_pieces(pieces_of_ids(ids, 512, prompt_tokens))

    long, short = chain_of_ids([7, 8, 9], 1300), chain_of_ids([7, 8], 700)
    assert (len(long), len(short)) == (20, 10)
    assert alike(long, short) == 10
    assert alike(long, chain_of_ids([8, 7, 9], 1300)) == 0
    assert len(chain_of_ids([7], 5000)) == 8, "what no id covers is nobody else's"
