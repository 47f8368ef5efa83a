"""Tests of the torch engine's KV blocks: every token of a sequence has a position of its own."""

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from services.worker.engines.torch.paged import Blocks, Place  # noqa: E402

EXAMPLES = int(os.environ.get("SLACKLINE_TORCH_EXAMPLES", "8"))
seeded = settings(deadline=None, print_blob=True, max_examples=EXAMPLES)


@seeded
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5))
def test_a_sequence_grows_while_a_block_is_free_and_no_position_is_anothers(
    seed: int, total: int, block_tokens: int
) -> None:
    rng = Random(seed)
    blocks = Blocks(total, block_tokens)
    held: dict[int, tuple[Place, int]] = {}
    for step in range(100):
        place, tokens = held.pop(rng.randrange(6), (Place(block_tokens, rng.randint(0, 100)), 0))
        if tokens and rng.random() < 0.3:
            blocks.release(place)
        else:
            room = blocks.free * block_tokens + -tokens % block_tokens
            tokens += rng.randint(0, room)
            blocks.grow(place, tokens)
            held[step] = (place, tokens)
            held = dict(enumerate(held.values()))
        assert blocks.free == total - sum(-(-tokens // block_tokens) for _, tokens in held.values())
        every = [
            position
            for place, tokens in held.values()
            for position in place.positions(0, tokens).tolist()
        ]
        assert len(set(every)) == len(every)
        assert set(every) <= set(range(total * block_tokens))
        for place, tokens in held.values():
            first = rng.randint(0, tokens)
            stretches = place.within(first, tokens)
            assert [
                position for begin, end in stretches for position in range(begin, end)
            ] == place.positions(first, tokens).tolist()
