"""The seal of a heavy value in the store: its length and its checksum, before its bytes. The server
has a checksum of its own for what lies on its disk; this one goes from writer to reader.
"""

import struct
import zlib

from shared.errors import StoreDamaged

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
