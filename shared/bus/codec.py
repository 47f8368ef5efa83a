"""Turns structs to bytes and back: msgpack, or JSON for clients whose Content-Type says so."""

import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from shared import subjects
from shared.bus.api import RefusedError
from shared.errors import UNDECODABLE, PeerError, Unsendable
from shared.schemas import Refused

CONTENT_TYPE = "Content-Type"
JSON_TYPE = "application/json"
# headers of the NATS services API, so that its tools show refusals as errors
ERROR_HEADER = "Nats-Service-Error"
ERROR_CODE_HEADER = "Nats-Service-Error-Code"

_msgpack = msgspec.msgpack.Encoder()
_json = msgspec.json.Encoder()
_AT_PATH = re.compile(r"at `\$\.?(?P<path>[^`]+)`")


def speaks_json(headers: Mapping[str, str] | None) -> bool:
    if not headers:
        return False
    kind = headers.get(CONTENT_TYPE) or headers.get("content-type", "")
    return kind.startswith(JSON_TYPE)


def encode(msg: msgspec.Struct, *, json: bool) -> bytes:
    """A message's bytes. JSON has no infinity, so a struct that may hold one (an Offer) never goes
    to a client. Raises Unsendable for integers over 64 bits, and too deep a nesting.
    """
    try:
        return _json.encode(msg) if json else _msgpack.encode(msg)
    except OverflowError as error:
        raise Unsendable(f"a number is too large: {error}") from error
    except RecursionError as error:
        raise Unsendable(f"the message is nested too deeply: {error}") from error


def with_content_type(headers: Mapping[str, str] | None, *, json: bool) -> dict[str, str] | None:
    """The headers to send, or None: a command without any headers is cheaper."""
    if json:
        return {**(headers or {}), CONTENT_TYPE: JSON_TYPE}
    return dict(headers) if headers else None


def decode(kind: Any, raw: bytes, *, json: bool) -> Any:
    """The struct in these bytes; no bytes: no fields. Raises PeerError, naming the field."""
    try:
        return _decoder(kind, json).decode(raw or (b"{}" if json else EMPTY))
    except UNDECODABLE as error:
        found = _AT_PATH.search(str(error))
        hint = (
            ""
            if json or not raw.startswith(b"{")
            else f"; JSON needs the header {CONTENT_TYPE}: {JSON_TYPE}"
        )
        raise PeerError(
            f"payload: {error}{hint}", param=found["path"] if found else None
        ) from error


def received(kind: Any, subject: str, raw: bytes, *, json: bool) -> Any:
    """The message that came on this subject. Raises PeerError as `decode` does, and where it names
    another replica than its subject does: a sender speaks only for its own replica.
    """
    msg = decode(kind, raw, json=json)
    if hasattr(msg, "replica") and subjects.replica_in(subject) not in (None, msg.replica):
        raise PeerError("the subject is another replica's", param="replica")
    return msg


EMPTY = b"\x80"  # a map without entries


@functools.cache
def _decoder(kind: Any, json: bool) -> Any:
    return msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)


def refusal(error: PeerError) -> Refused:
    return Refused(code=error.code, message=error.message, param=error.param)


def refusal_headers(refused: Refused) -> dict[str, str]:
    status = "429" if refused.retry_after_s is not None else "400"
    return {ERROR_HEADER: refused.message.replace("\n", " "), ERROR_CODE_HEADER: status}


def answer(kind: Any, raw: bytes, headers: Mapping[str, str] | None) -> Any:
    """An answer as a `kind`. Raises RefusedError where headers say so, PeerError for all else."""
    json = speaks_json(headers)
    if not headers or ERROR_CODE_HEADER not in headers:
        return decode(kind, raw, json=json)
    try:
        refused = decode(Refused, raw, json=json)
    except PeerError:  # an error of another services-API program: only the headers describe it
        refused = Refused(
            code=headers[ERROR_CODE_HEADER], message=headers.get(ERROR_HEADER, "refused")
        )
    raise RefusedError(refused)
