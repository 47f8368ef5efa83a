"""Encodes the JSON that leaves the gateway. Characters that some readers take for the end of a line
(U+2028, U+2029 and U+0085, in Python's str.splitlines and httpx) are escaped.
"""

from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode
_ESCAPED = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def encode(value: Any) -> bytes:
    raw = _encode(value)
    if not raw.isascii():
        for character, escape in _ESCAPED:  # in a string: nothing else in JSON is beyond ASCII
            raw = raw.replace(character, escape)
    return raw
