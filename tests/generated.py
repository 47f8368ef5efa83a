"""Makes messages from their types, to test decoders: valid, near-valid, and tampered bytes.

Hypothesis draws the seeds, and prints that of a failure; `make fuzz` raises SLACKLINE_EXAMPLES.
"""

import math
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import msgspec.inspect as types
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# what breaks decoders, arithmetic, stores and templates elsewhere
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 5e-324, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
    "", "a b", ".", ">", "*", "\x00", "\r\n", "é", "\U0001f600", "../../etc/passwd", 300 * "x",
    b"", b"\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff", [], {}, [[]], [None], {"": None},
    {"type": "stop"}, [[[[[[[[[[]]]]]]]]]],
]  # fmt: skip

FLOATS = (0.0, 0.5, 1.0, 3.25, 1e-9, 1e9, 5e-324, 1e308, -1.0, -1e308)

seeds = st.randoms(use_true_random=True)
few = settings(
    max_examples=max(4, settings().max_examples // 10), suppress_health_check=list(HealthCheck)
)
fuzzed = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def valid(kind: Any, rng: Random, *, json: bool = False) -> Any:
    """Builtins that a decoder of `kind` takes, except where a struct checks itself. For JSON, bytes
    are text in base64.
    """
    return _Maker(rng, json).make(types.type_info(kind))


def near(kind: Any, rng: Random, *, json: bool = False) -> Any:
    """Builtins with one or two places wrong: a value replaced by an odd one, a key removed, or one
    added.
    """
    value = valid(kind, rng, json=json)
    for _ in range(rng.randint(1, 2)):
        value = _damaged(value, rng, _odd(json))
    return value


def tampered(raw: bytes, rng: Random) -> bytes:
    """Bytes cut off, changed, doubled or put in at up to three places."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(raw))
        raw = rng.choice(
            (
                raw[:at],
                raw[:at] + rng.randbytes(rng.randint(1, 4)) + raw[at + 1 :],
                raw[:at] + raw[at // 2 :],
                raw[:at] + rng.randbytes(rng.randint(1, 8)) + raw[at:],
            )
        )
    return raw


def encoded(value: Any, encode: Callable[[Any], bytes]) -> bytes:
    """The bytes of builtins; a byte of nothing where they cannot be written."""
    try:
        return encode(value)
    except (OverflowError, ValueError, TypeError):
        return b"\xc1"


class _Maker:
    def __init__(self, rng: Random, json: bool) -> None:
        self._rng, self._json = rng, json

    def make(self, kind: types.Type) -> Any:
        rng = self._rng
        match kind:
            case types.StructType():
                return self._struct(kind)
            case types.UnionType():
                return self.make(rng.choice(kind.types))
            case types.IntType():
                return self._int(kind)
            case types.FloatType():
                return self._float(kind)
            case types.StrType():
                if kind.pattern is not None:
                    return "a1"
                most = 12 if kind.max_length is None else min(kind.max_length, 12)
                size = rng.randint(kind.min_length or 0, most)
                return "".join(rng.choices('ab1._-> *{"\\\n\x00é€\U0001f600', k=size))
            case types.BytesType():
                raw = rng.randbytes(4 * rng.randint(0, 4))
                return msgspec.to_builtins(raw) if self._json else raw
            case types.BoolType():
                return rng.random() < 0.5
            case types.NoneType():
                return None
            case types.EnumType():
                return rng.choice([member.value for member in kind.cls])
            case types.LiteralType():
                return rng.choice(kind.values)
            case types.ListType() | types.VarTupleType():
                size = rng.randint(kind.min_length or 0, (kind.min_length or 0) + 2)
                return [self.make(kind.item_type) for _ in range(size)]
            case types.TupleType():
                return [self.make(item) for item in kind.item_types]
            case types.DictType():
                pairs = [
                    (self.make(kind.key_type), self.make(kind.value_type))
                    for _ in range(rng.randint(0, 2))
                ]
                return {str(key) if self._json else key: value for key, value in pairs}
            case types.AnyType():
                return rng.choice(_odd(self._json))
        raise NotImplementedError(f"no messages have {kind}")

    def _struct(self, kind: types.StructType) -> Any:
        if kind.array_like:
            return [self.make(f.type) for f in kind.fields]
        fields = {
            f.encode_name: self.make(f.type)
            for f in kind.fields
            if f.required or self._rng.random() < 0.3
        }
        if kind.tag is not None:
            assert kind.tag_field is not None
            fields[kind.tag_field] = kind.tag
        return fields

    def _int(self, kind: types.IntType) -> int:
        least = kind.ge if kind.ge is not None else -(2**63) if kind.gt is None else kind.gt + 1
        most = kind.le if kind.le is not None else 2**63 - 1 if kind.lt is None else kind.lt - 1
        likely = (least, most, *(n for n in (0, 1, 2, 3, 16) if least <= n <= most))
        return self._rng.choice((*likely, self._rng.randint(int(least), int(most))))

    def _float(self, kind: types.FloatType) -> float:
        least, most = kind.ge or kind.gt, kind.le or kind.lt
        fitting = [
            x
            for x in (*FLOATS, least, most)
            if x is not None
            and (kind.ge is None or x >= kind.ge)
            and (kind.gt is None or x > kind.gt)
            and (kind.le is None or x <= kind.le)
            and (kind.lt is None or x < kind.lt)
        ]
        return self._rng.choice(fitting)


def _odd(json: bool) -> list[Any]:
    """The odd values that can be written: JSON has neither bytes nor infinities."""
    return [
        value
        for value in ODD
        if not json
        or not (isinstance(value, bytes) or (isinstance(value, float) and not math.isfinite(value)))
    ]


def _damaged(value: Any, rng: Random, odd: list[Any]) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(odd)
    if isinstance(value, list):
        at = rng.randrange(len(value))
        return [*value[:at], _damaged(value[at], rng, odd), *value[at + 1 :]]
    key, how = rng.choice(list(value)), rng.random()
    if how < 0.1:
        return {name: one for name, one in value.items() if name != key}
    if how < 0.2:
        return {**value, "odd": rng.choice(odd)}
    return {**value, key: _damaged(value[key], rng, odd)}


def nudged(value: Any, rng: Random) -> Any:
    """A message of ours with one place changed to what might stand there: a number nearby or at a
    bound, an entry left out or doubled, a column with another int32.
    """
    match value:
        case dict() if value:
            told = [key for key, one in value.items() if one not in (None, b"", "", 0, [])]
            key = rng.choice(told if told and rng.random() < 0.7 else list(value))
            return {**value, key: nudged(value[key], rng)}
        case list() if value:
            at = rng.randrange(len(value))
            before, one, after = value[:at], value[at], value[at + 1 :]
            instead = rng.choice(([], [one, one], [nudged(one, rng)], [nudged(one, rng)]))
            return [*before, *instead, *after]
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, 2 * value, 0, 1, 3, 2**31 - 1, 2**53 - 1))
        case float():
            return rng.choice((value + 1.0, -value, 0.0, 1e9, 1e308, -1e308, math.inf, math.nan))
        case bytes():
            return _column(value, rng)
        case str():
            return rng.choice(("", f"{value}x", "r1", "default.q1", "stop", "expired"))
    return rng.choice((None, 0, 0.5, "", b"", []))


def _column(raw: bytes, rng: Random) -> bytes:
    """A column of int32 with one value replaced, left out or added; the slots of a fleet are 0 to
    15.
    """
    at = 4 * rng.randint(0, max(len(raw) // 4 - 1, 0))
    one = struct.pack("<i", rng.choice((0, 1, 2, 15, 16, -1, 2**31 - 1, -(2**31))))
    return rng.choice((raw[:at] + one + raw[at + 4 :], raw[:at] + raw[at + 4 :], raw + one))
