"""Encodes values for the store, and decodes each once before it is written. Large ones are sealed:
their length and checksum let a reader see damage; the server's checksum guards only its disk.
"""

import struct
import zlib
from typing import TypeVar

import msgspec

from shared.errors import UNDECODABLE, PeerError, StoreDamaged

_SEAL = struct.Struct("<II")  # bytes that follow, and their CRC-32


def sealed(value: bytes) -> bytes:
    return _SEAL.pack(len(value), zlib.crc32(value)) + value


def opened(name: str, stored: bytes) -> bytes:
    """The value that was sealed. Raises StoreDamaged, with the `name`, if it is not whole."""
    if len(stored) < _SEAL.size:
        raise StoreDamaged(f"{name} is damaged in the store: it has {len(stored)} bytes")
    size, checksum = _SEAL.unpack_from(stored)
    value = stored[_SEAL.size :]
    if len(value) != size:
        raise StoreDamaged(f"{name} is damaged in the store: {len(value)} bytes of {size}")
    if zlib.crc32(value) != checksum:
        raise StoreDamaged(f"{name} is damaged in the store: its checksum is another")
    return value


T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


def readable(decoder: msgspec.msgpack.Decoder[T], value: T) -> bytes:
    """The bytes of a value. Raises PeerError if they cannot be read again: they are not stored."""
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
