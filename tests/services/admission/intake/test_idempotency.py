"""Tests of the digest by which admission tells a retry of a request from another request."""

import msgspec
import pytest
from msgspec.structs import replace

from services.admission.intake.idempotency import digest
from shared.bus import codec
from shared.errors import PeerError
from shared.schemas import GenerateRequest, Sampling
from shared.vocabulary import Slo

FIRST = GenerateRequest(
    request_id="a",
    tenant="acme",
    messages=[{"role": "user", "content": "hello"}],
    sampling=Sampling(logit_bias={1: 2.0, 3: 4.0}),
    slo=Slo(ttft_s=1.0),
)
SAME = {
    "request_id": "b", "inbox": "_INBOX.acme.x", "importance": 3.0, "application": "x",
    "session": "x", "expires_s": 1.0,
}  # fmt: skip
OTHER = {
    "prompt": "hello", "messages": [{"role": "user", "content": "hello!"}], "token_ids": [1],
    "model": "m", "adapter": "x", "sampling": Sampling(), "slo": None, "allow_relegation": False,
    "tools": [{"type": "function", "function": {"name": "f"}}], "chat_template_kwargs": {"a": 1},
    "choices": 2,
}  # fmt: skip


@pytest.mark.parametrize("field", SAME)
def test_what_a_retry_may_change_leaves_the_digest(field: str) -> None:
    assert digest(replace(FIRST, **{field: SAME[field]}), "chat") == digest(FIRST, "chat")


@pytest.mark.parametrize("field", OTHER)
def test_what_shapes_the_answer_changes_the_digest(field: str) -> None:
    assert digest(replace(FIRST, **{field: OTHER[field]}), "chat") != digest(FIRST, "chat")


def test_another_tier_changes_the_digest() -> None:
    assert digest(FIRST, "batch") != digest(FIRST, "chat")


def test_every_field_of_a_request_is_decided_about() -> None:
    """The tenant is left out of the digest: it is part of the record's key."""
    assert {*SAME, *OTHER, "tenant"} == set(GenerateRequest.__struct_fields__)


def test_the_order_and_the_encoding_of_a_message_are_no_difference() -> None:
    turned = replace(
        FIRST,
        messages=[{"content": "hello", "role": "user"}],
        sampling=Sampling(logit_bias={3: 4.0, 1: 2.0}),
    )
    sent = msgspec.json.encode(turned)
    assert digest(codec.decode(GenerateRequest, sent, json=True), "chat") == digest(FIRST, "chat")


def test_messages_may_have_any_keys_and_no_values_beyond_json() -> None:
    odd = replace(FIRST, messages=[{"role": "user", "content": {1: "a", "b": 2}}])
    assert digest(odd, "chat") != digest(FIRST, "chat")
    with pytest.raises(PeerError):
        digest(replace(FIRST, messages=[{"content": [msgspec.msgpack.Ext(1, b""), 2**70]}]), "chat")
