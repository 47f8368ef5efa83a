"""Tests of sealed values in the store: each is read whole, or is an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import StoreDamaged
from shared.store.seal import opened, sealed


@given(st.binary(max_size=200))
def test_what_was_sealed_is_opened(value: bytes) -> None:
    assert opened("o.t.1.0", sealed(value)) == value


@given(value=st.binary(max_size=200), data=st.data())
def test_one_wrong_bit_or_a_missing_end_is_an_error_with_the_key(
    value: bytes, data: st.DataObject
) -> None:
    whole = sealed(value)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    for damaged in (cut, bytes(flipped), whole + b"x"):
        with pytest.raises(StoreDamaged, match=r"o\.t\.1\.0 is damaged in the store"):
            opened("o.t.1.0", damaged)
