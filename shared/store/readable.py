"""Values as stored bytes. What cannot be read is not stored, nor was it written by us."""

from typing import TypeVar

import msgspec

from shared.errors import UNDECODABLE, PeerError, StoreDamaged

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


def readable(decoder: msgspec.msgpack.Decoder[T], value: T) -> bytes:
    """The bytes of a value, after they have been read again. Raises PeerError."""
    stored = _encode(value)
    try:
        decoder.decode(stored)
    except UNDECODABLE as error:
        name = type(value).__name__
        raise PeerError(
            f"the {name} could not be read again: {error}", code="unreadable"
        ) from error
    return stored


def read(decoder: msgspec.msgpack.Decoder[T], key: str, value: bytes) -> T:
    """The value of the bytes. Raises StoreDamaged."""
    try:
        return decoder.decode(value)
    except UNDECODABLE as error:
        raise StoreDamaged(f"{key} cannot be read: {error}") from error
