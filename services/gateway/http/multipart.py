"""Reads multipart/form-data (RFC 7578) as it arrives, and keeps no more than one part's head."""

import re
from typing import NamedTuple

from shared.errors import PeerError

HEAD_LIMIT = 8 * 1024  # bytes of the head of one part
PARTS_LIMIT = 32
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
# a token needs no quotes, and .NET writes none
_FIELD = re.compile(
    r'(?:^|;)\s*(name|filename)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE
)


class Began(NamedTuple):
    """A part begins; `filename` is None for a field that is no file."""

    name: str
    filename: str | None


class Bytes(NamedTuple):
    """More of the part that began last."""

    data: bytes


Piece = Began | Bytes


def boundary_of(content_type: str) -> bytes:
    """Raises PeerError for another type, or one without a boundary."""
    kind, _, rest = content_type.partition(";")
    found = _BOUNDARY.search(rest) if kind.strip().lower() == "multipart/form-data" else None
    if found is None:
        raise _malformed("the Content-Type must be multipart/form-data, with a boundary")
    return (found[1] or found[2]).encode()


class Form:
    """One form. `whole` once its end has come."""

    def __init__(self, boundary: bytes) -> None:
        self.whole = False
        self._mark = b"\r\n--" + boundary
        self._kept = b"\r\n"  # as if a line ended before the first boundary
        self._in_head = False  # between a boundary and the end of the head that follows
        self._in_part = False
        self._parts = 0

    def feed(self, data: bytes) -> list[Piece]:
        """The pieces that are known now. Raises PeerError for a body that is no such form."""
        self._kept += data
        pieces: list[Piece] = []
        while not self.whole and self._step(pieces):
            pass
        if self.whole:
            self._kept = b""
        return pieces

    def _step(self, pieces: list[Piece]) -> bool:
        """Read one boundary, head or stretch of bytes. False: more of the body must come first."""
        return self._head(pieces) if self._in_head else self._body(pieces)

    def _head(self, pieces: list[Piece]) -> bool:
        if self._kept.startswith(b"--"):
            self.whole = True
            return False
        if len(self._kept) < 2:
            return False
        at = self._kept.find(b"\r\n\r\n")
        if at < 0:
            if len(self._kept) > HEAD_LIMIT:
                raise _malformed("the head of a part is too long")
            return False
        head, self._kept = self._kept[:at], self._kept[at + 4 :]
        self._parts += 1
        if self._parts > PARTS_LIMIT or len(head) > HEAD_LIMIT:
            raise _malformed("the form has too many parts, or too long a head")
        pieces.append(_began(head))
        self._in_head, self._in_part = False, True
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        at = self._kept.find(self._mark)
        # bytes that may begin a boundary wait
        end = at if at >= 0 else max(0, len(self._kept) - len(self._mark) + 1)
        if end and not self._in_part:
            raise _malformed("the body does not begin with its boundary")
        if end:
            pieces.append(Bytes(self._kept[:end]))
        self._kept = self._kept[end:]
        if at < 0:
            return False
        self._kept = self._kept[len(self._mark) :]
        self._in_head, self._in_part = True, False
        return True


def _began(head: bytes) -> Began:
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            fields = {key.lower(): quoted or token for key, quoted, token in _FIELD.findall(value)}
            if "name" in fields:
                return Began(fields["name"], fields.get("filename"))
    raise _malformed("a part has no name")


def _malformed(message: str) -> PeerError:
    return PeerError(f"malformed form: {message}", param="file")
