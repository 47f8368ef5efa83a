"""The time to encode and decode each message of a request's life, at realistic sizes."""

import time
from collections.abc import Callable

from msgspec import Struct

from loadgen.bench.figure import Figure
from shared.bus import codec
from shared.columns import pack
from shared.core.offer import as_offer
from shared.schemas import (
    BatchPlan,
    Body,
    Delta,
    GenerateRequest,
    Hold,
    PlanAck,
    Record,
    Sampling,
)
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass, Slo

PART = "messages"
KEY, REPLICA = RequestKey("bench.0123456789abcdef"), ReplicaId("r1")
ENTRIES, PROMPT_TOKENS = 256, 1000


def measure(repeats: int) -> list[Figure]:
    return [_cost(name, msg, repeats) for name, msg in _messages().items()]


def _cost(name: str, msg: Struct, repeats: int) -> Figure:
    raw = codec.encode(msg, json=False)
    encode_s = _best_s(lambda: codec.encode(msg, json=False), repeats)
    decode_s = _best_s(lambda: codec.decode(type(msg), raw, json=False), repeats)
    note = f"{encode_s * 1e6:.1f} to encode, {decode_s * 1e6:.1f} to decode, {len(raw)} bytes"
    return Figure(PART, name, encode_s + decode_s, "us", note=note)


def _best_s(call: Callable[[], object], repeats: int) -> float:
    """The seconds of one call: the least of five means, to exclude the work of other processes."""
    best_s = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        best_s = min(best_s, (time.perf_counter() - began) / repeats)
    return best_s


def _messages() -> dict[str, Struct]:
    slots, ones = pack(range(ENTRIES)), pack([1] * ENTRIES)
    record = Record(
        key=KEY,
        body_key=f"{KEY}.0",
        owner="admission-0",
        state=RecordState.ACTIVE,
        attempt=1,
        service_class=ServiceClass.STANDARD,
        tier="chat",
        slo=Slo(ttft_s=1.0, tbt_s=0.1),
        importance=1.0,
        application="chat",
        session="",
        arrived_unix_s=1.8e9,
        expires_unix_s=1.9e9,
        prompt_tokens=PROMPT_TOKENS,
        max_tokens=256,
        stream_subject="_INBOX.x.1",
        replica=REPLICA,
        incarnation="0123456789ab",
    )
    body = Body(prompt=pack([120] * PROMPT_TOKENS), sampling=Sampling())
    plan = BatchPlan(
        replica=REPLICA,
        incarnation="0123456789ab",
        epoch=1,
        sync=1,
        seq=1,
        slots=slots,
        caps=ones,
        predicted_s=0.02,
    )
    ack = PlanAck(
        replica=REPLICA,
        incarnation="0123456789ab",
        epoch=1,
        plan_seq=1,
        ack_seq=1,
        slots=slots,
        computed=ones,
        emitted=ones,
        tokens=ones,
        texts=["x"] * ENTRIES,
    )
    return {
        f"request, {PROMPT_TOKENS} characters": GenerateRequest(
            request_id="0123456789abcdef", prompt="x" * PROMPT_TOKENS
        ),
        f"body, {PROMPT_TOKENS} tokens": body,
        "record": record,
        "offer": as_offer(record, ServiceClass.STANDARD),
        "hold": Hold(epoch=1, sync=1, slot=1, key=KEY, attempt=1, body_key=record.body_key),
        f"plan, {ENTRIES} entries": plan,
        f"ack, {ENTRIES} entries": ack,
        "delta": Delta(attempt=1, offset=100, tokens=[120], text="x", text_offset=100),
    }
