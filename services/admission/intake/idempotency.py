"""Computes the digest of a request, kept in its record. Another request under the same id is a
conflict; the same request again is a retry, which gets the first one's answer.
"""

import hashlib
from typing import Any

import msgspec

from shared.errors import PeerError
from shared.schemas import GenerateRequest

DIGEST_BYTES = 16

_encode_in_order = msgspec.json.Encoder(order="deterministic").encode


def digest(request: GenerateRequest, tier: str) -> bytes:
    """The digest of all that shapes the answer: prompt, messages or token ids, model, adapter,
    sampling, tier, SLO, choices, and whether it may be relegated. A retry may differ in the inbox
    and its encoding, the trace, `importance`, `application`, `session` and `expires_s`: those of
    the first request stay. Raises PeerError for messages that JSON cannot express.
    """
    try:
        shaping: tuple[Any, ...] = (
            request.prompt,
            request.token_ids,
            request.model,
            request.adapter,
            tier,
            request.slo,
            request.allow_relegation,
            _in_order(request.messages),
            _with_text_keys(request.sampling),
        )
        if request.tools or request.chat_template_kwargs:
            shaping += (_in_order([request.tools, request.chat_template_kwargs]),)
        if request.choices > 1:
            shaping += (request.choices,)
        said = _encode_in_order(shaping)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise PeerError(f"messages cannot be read: {error}", param="messages") from error
    return hashlib.blake2b(said, digest_size=DIGEST_BYTES).digest()


def _in_order(value: object) -> msgspec.Raw:
    """The JSON of a value. `_with_text_keys`, hardly ever needed, takes five times as long."""
    try:
        return msgspec.Raw(_encode_in_order(value))
    except TypeError:
        return msgspec.Raw(_encode_in_order(_with_text_keys(value)))


def _with_text_keys(value: object) -> object:
    """The value as JSON has it, in which every key is a text: only those have an order."""
    return msgspec.json.decode(msgspec.json.encode(value))
