"""Tests of the books of a prefix cache."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.prefixes.cache import Kept, PrefixCache
from shared.prefix import CHAIN_TOKENS, PLACES


@given(st.integers(0, 1 << 32), st.integers(0, 12))
def test_the_books_balance_and_a_block_stays_until_its_room_is_needed(seed: int, room: int) -> None:
    rng, cache, held, told = Random(seed), PrefixCache(room), list[Kept](), set[int]()
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
            kept_now, dropped = cache.changes.take()
            told = (told | set(kept_now)) - set(dropped)
            assert told == {each for each in range(1, 2223) if cache.match([each])}, "as told"


def test_what_lies_between_two_places_is_not_told() -> None:
    cache, text = PrefixCache(100), Kept(list(range(1, 81)))
    cache.name(text, 80 * CHAIN_TOKENS)
    assert cache.changes.take() == ([n for n in range(1, 81) if n in PLACES], [])


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
    assert cache.shared == 0 and cache.idle([1, 2]) == 2 - 2 * again
