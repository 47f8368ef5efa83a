"""Tests of the books of a prefix cache."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.prefixes.cache import Entry, Kept, PrefixCache
from shared.prefix import CHAIN_TOKENS, PLACES


@given(st.integers(0, 1 << 32), st.integers(0, 12), st.integers(0, 6))
def test_the_books_balance_and_a_block_stays_until_its_room_is_needed(
    seed: int, room: int, host: int
) -> None:
    rng, cache, held = Random(seed), PrefixCache(room, host_blocks=host), list[Kept]()
    told, moved = set[int](), set[int]()
    for _ in range(80):
        if held and rng.random() < 0.4:
            cache.release(held.pop(rng.randrange(len(held))))
        elif held and rng.random() < 0.3:
            cache.name(rng.choice(held), CHAIN_TOKENS * rng.randint(0, 6))
        else:
            kept = Kept([int(f"{''.join(rng.choices('12', k=n))}") for n in range(1, 5)])
            cache.take(kept, cache.match(kept.chain))
            cache.fit(rng.randint(0, room))
            held.append(kept)
        cache.check(held)
        if rng.random() < 0.5:
            now, away, gone = map(set, cache.changes.take())
            told, moved = (told | now | away) - gone, (moved | away) - now - gone
            assert told == {each for each in range(1, 2223) if cache.match([each])}, "as told"
            assert len(moved) <= host
    now, away, gone = map(set, cache.changes.take())
    moved, before = (moved | away) - now - gone, cache.loaded_tokens
    for each in moved:
        cache.take(Kept([each]), 1)
    assert cache.loaded_tokens == before + CHAIN_TOKENS * len(moved), "these were in the host"


def test_what_lies_between_two_places_is_not_told() -> None:
    cache, text = PrefixCache(100), Kept(list(range(1, 81)))
    cache.name(text, 80 * CHAIN_TOKENS)
    assert cache.changes.take() == ([n for n in range(1, 81) if n in PLACES], [], [])


def test_the_text_left_longest_ago_gives_way_first_and_its_end_before_its_beginning() -> None:
    cache, old, new = PrefixCache(4), Kept([1, 2]), Kept([3, 4])
    for kept in (new, old):
        cache.name(kept, 2 * CHAIN_TOKENS)
    cache.release(old)
    cache.release(new)
    cache.fit(3)
    assert (cache.match([1, 2]), cache.match([3, 4])) == (1, 2)
    cache.fit(1)
    assert (cache.match([1, 2]), cache.match([3, 4])) == (0, 1)


@pytest.mark.parametrize("again", [0, 1])
def test_a_second_copy_is_not_shared_and_a_taken_block_is(again: int) -> None:
    cache, first, second = PrefixCache(9), Kept([1, 2]), Kept([1, 2, 3])
    cache.name(first, 2 * CHAIN_TOKENS)
    if again:
        cache.take(second, cache.match(second.chain))
    cache.name(second, 3 * CHAIN_TOKENS)
    assert cache.shared == 2 * again
    cache.release(first)
    assert cache.shared == 0 and cache.claims([1, 2]) == 2 - 2 * again


def test_what_gives_way_goes_to_the_host_and_comes_back_to_free_blocks() -> None:
    cache, first, second = PrefixCache(4, host_blocks=3), Kept([1, 2, 3]), Kept([1, 2, 3, 4])
    cache.name(first, 3 * CHAIN_TOKENS)
    cache.release(first)
    cache.fit(1)
    assert cache.changes.take() == ([1], [2, 3], [])  # the end went first
    entry = Entry(second, 0, 5 * CHAIN_TOKENS, CHAIN_TOKENS)
    assert cache.find([entry], 3) == [0], "with one to compute there is no room for all three"
    assert cache.find([entry], 4) == [3 * CHAIN_TOKENS]
    assert cache.loaded_tokens == 2 * CHAIN_TOKENS
    assert cache.changes.take() == ([2, 3], [], [])
    cache.check([second])


def test_in_the_host_too_the_text_left_longest_ago_gives_way_first() -> None:
    cache, old, new = PrefixCache(4, host_blocks=3), Kept([1, 2]), Kept([3, 4])
    for kept in (old, new):
        cache.name(kept, 2 * CHAIN_TOKENS)
        cache.release(kept)
    cache.fit(0)
    assert (cache.match([1, 2]), cache.match([3, 4])) == (1, 2)
    assert cache.changes.take().dropped == [2]


def test_a_block_that_is_computed_again_is_in_one_place() -> None:
    cache, first, again = PrefixCache(4, host_blocks=4), Kept([1]), Kept([1])
    cache.name(first, CHAIN_TOKENS)
    cache.release(first)
    cache.fit(0)
    cache.name(again, CHAIN_TOKENS)  # there was no room to bring it back
    assert cache.changes.take() == ([1], [], [])
    cache.check([again])
