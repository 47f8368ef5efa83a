"""Tests of the decoders of all messages on the bus and in the store: they turn any bytes into a
message or a PeerError, and a decoded message can be stored and read again.
"""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import msgspec.inspect as types
import pytest
from hypothesis import given

from shared import schemas, subjects
from shared.bus import codec
from shared.errors import PeerError
from shared.measure import Measure
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass
from tests.generated import encoded, fuzzed, near, seeds, tampered, valid
from tests.shared.bus.kinds import KINDS

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind, "__name__", ""))


def written(value: Any, *, as_json: bool) -> bytes:
    return encoded(
        value, lambda v: json.dumps(v).encode() if as_json else msgspec.msgpack.encode(v)
    )


def read(kind: Any, raw: bytes, *, as_json: bool) -> Any:
    """The message, or None for bytes that are refused. Anything else fails the test."""
    try:
        message = codec.decode(kind, raw, json=as_json)
    except PeerError as error:
        for as_json in (True, False):  # it can be told to any asker
            codec.encode(codec.refusal(error), json=as_json)
        return None
    stored = codec.encode(message, json=False)
    again = codec.decode(kind, stored, json=False)
    assert codec.encode(again, json=False) == stored
    return message


@every_kind
@fuzzed
@given(rng=seeds)
def test_a_message_made_by_its_type_is_read_and_stays_what_it_is(kind: Any, rng: Random) -> None:
    as_json = rng.random() < 0.5
    raw = written(valid(kind, rng, json=as_json), as_json=as_json)
    if read(kind, raw, as_json=as_json) is None:  # by a struct's own check of several fields
        with pytest.raises(PeerError, match=r"must|bound|draft|pairs"):
            codec.decode(kind, raw, json=as_json)


@every_kind
@fuzzed
@given(rng=seeds)
def test_a_message_with_something_odd_in_it_is_read_or_refused(kind: Any, rng: Random) -> None:
    as_json = rng.random() < 0.5
    read(kind, written(near(kind, rng, json=as_json), as_json=as_json), as_json=as_json)


@every_kind
@fuzzed
@given(rng=seeds)
def test_tampered_bytes_are_read_or_refused(kind: Any, rng: Random) -> None:
    as_json = rng.random() < 0.5
    raw = written(valid(kind, rng, json=as_json), as_json=as_json)
    read(kind, tampered(raw, rng), as_json=as_json)
    read(kind, rng.randbytes(rng.randint(0, 100)), as_json=as_json)


@every_kind
@pytest.mark.parametrize("depth", [10, 1_000, 100_000])
def test_deep_nesting_is_refused(kind: Any, depth: int) -> None:
    read(kind, depth * b"[", as_json=True)
    read(kind, depth * b'{"messages":[', as_json=True)
    read(kind, depth * b"\x91", as_json=False)
    read(kind, depth * b"\x81\xa8messages\x91", as_json=False)


def test_a_message_that_names_another_replica_than_its_subject_is_refused() -> None:
    """A user that may send for one replica speaks for no other."""
    ack = schemas.PlanAck(replica=ReplicaId("r1"), incarnation="i", epoch=1, plan_seq=1, ack_seq=1)
    raw = codec.encode(ack, json=False)
    assert codec.received(schemas.PlanAck, subjects.acked(ReplicaId("r1")), raw, json=False) == ack
    for replica in ("r2", "r", "r11"):
        with pytest.raises(PeerError, match="another replica"):
            codec.received(schemas.PlanAck, subjects.acked(ReplicaId(replica)), raw, json=False)
    over = codec.encode(over_of(b""), json=False)
    with pytest.raises(PeerError, match="another replica"):
        codec.received(schemas.AttemptOver, subjects.over(ReplicaId("r2")), over, json=False)


def over_of(output: bytes, **measured: Any) -> schemas.AttemptOver:
    return schemas.AttemptOver(
        key=RequestKey("a.b"),
        attempt=1,
        replica=ReplicaId("r1"),
        incarnation="i",
        why="stop",
        relegated=False,
        service_class=ServiceClass.STANDARD,
        resume=schemas.Resume(tokens=output, measure=Measure(**measured)),
    )


def test_the_output_of_an_attempt_is_as_long_as_its_measure_says() -> None:
    """Such a request was offered for ever: no planner could read the offer."""
    raw = codec.encode(over_of(b"\1\0\0\0", tokens=1), json=False)
    assert codec.decode(schemas.AttemptOver, raw, json=False).resume.measure.tokens == 1
    for tokens, count in ((b"", 1), (b"\1\0\0\0", 0), (b"\1\0\0", 0), (b"", -1)):
        forged = msgspec.to_builtins(over_of(b""))
        forged["resume"] = {"tokens": tokens, "measure": {"tokens": count}}
        with pytest.raises(PeerError):
            codec.decode(schemas.AttemptOver, msgspec.msgpack.encode(forged), json=False)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_a_time_or_an_importance_that_is_no_number_is_refused(number: float) -> None:
    """In a planner's sums such a number would spoil them, and end the planning for its replica."""
    ack = {
        "type": "ack", "replica": "r1", "incarnation": "i", "epoch": 1, "plan_seq": 1, "ack_seq": 1,
    }  # fmt: skip
    offer = {
        "key": "a.b", "attempt": 1, "service_class": "standard", "tier": "", "slo": {"ttft_s": 1.0},
        "application": "", "arrived_unix_s": 0.0, "prompt_tokens": 1, "max_tokens": 1,
    }  # fmt: skip
    for kind, name, message in (
        (schemas.PlanAck, "exec_s", ack),
        (schemas.LogEntry, "exec_s", ack),
        (schemas.Offer, "importance", offer),
    ):
        codec.decode(kind, msgspec.msgpack.encode(message | {name: 1.0}), json=False)
        with pytest.raises(PeerError, match=name):
            codec.decode(kind, msgspec.msgpack.encode(message | {name: number}), json=False)


def parts() -> Iterator[tuple[str, types.Type]]:
    """Every type within these kinds, and the field that has it; each struct once."""
    seen: set[type] = set()
    todo = [("", types.type_info(kind)) for kind in KINDS]
    while todo:
        where, kind = todo.pop()
        if isinstance(kind, types.StructType):
            if kind.cls in seen:
                continue
            seen.add(kind.cls)
            todo += [(f"{kind.cls.__name__}.{f.name}", f.type) for f in kind.fields]
        yield where, kind
        inner = [*getattr(kind, "types", ()), *getattr(kind, "item_types", ())]
        inner += [getattr(kind, name, None) for name in ("item_type", "key_type", "value_type")]
        todo += [(where, one) for one in inner if isinstance(one, types.Type)]


def test_every_integer_has_bounds() -> None:
    """A service that makes room for what a number says makes no more than the bound says."""
    open_ended = {
        where
        for where, kind in parts()
        if isinstance(kind, types.IntType)
        and ((kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None))
    }
    assert not open_ended


def test_every_message_is_tried() -> None:
    """A message that is new in the schemas is part of one of these kinds, or is added to them."""
    seen = {kind.cls.__name__ for _, kind in parts() if isinstance(kind, types.StructType)}
    declared = {
        name
        for name, one in vars(schemas).items()
        if isinstance(one, type)
        and issubclass(one, msgspec.Struct)
        and one.__module__ == schemas.__name__
    }
    assert declared - seen == set()
