"""Writes down how the messages of this release look: `python -m tests.releases.sample`.

Run it for each release, before its tag. The file has, for each kind of message that crosses the bus
or lies in the store, three of them as this release writes them; and for each struct its fields, and
which of them must be there. test_releases.py reads the files with the code of today.
"""

import base64
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import msgspec.inspect as types

from services.gateway.batches.file_store import FileObject
from services.gateway.batches.record import BatchRecord
from shared.bus import codec
from shared.bus.objects import ObjectInfo
from shared.bus.subscriptions import VERSION
from shared.errors import UNDECODABLE, PeerError
from shared.schemas import Verdict
from shared.store.usage import DaySum
from tests.generated import valid
from tests.shared.bus.kinds import KINDS

FOLDER = Path(__file__).parent
STORED: list[Any] = [BatchRecord, FileObject, ObjectInfo, DaySum, Verdict]
SEED, SAMPLES, TRIES = 7, 3, 10_000


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a struct, by the names that they have in messages."""

    required: list[str]
    optional: list[str]
    strict: bool  # a reader refuses fields that it does not know
    terse: bool  # a writer leaves out fields that have their defaults
    array: bool  # fields are told by their place


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """The messages of one release: samples by kind, as base64 of msgpack; structs by name."""

    version: str
    samples: dict[str, list[str]]
    shapes: dict[str, Shape]


def name_of(kind: Any) -> str:
    """The name of a struct, or the names of all that a union has."""
    return str(getattr(kind, "__name__", kind))


def all_kinds() -> dict[str, Any]:
    return {name_of(kind): kind for kind in (*KINDS, *STORED)}


def samples(kind: Any) -> Iterator[bytes]:
    """Drawn messages of a kind, as this code writes them."""
    rng, found = Random(SEED), 0
    for _ in range(TRIES):
        raw = msgspec.msgpack.encode(valid(kind, rng))
        try:
            message = codec.decode(kind, raw, json=False)
        except (PeerError, *UNDECODABLE):
            continue  # a struct checks more than its types say
        yield codec.encode(message, json=False)
        found += 1
        if found == SAMPLES:
            return
    raise AssertionError(f"no message of {name_of(kind)} in {TRIES} tries")


def shapes(kinds: Iterable[Any]) -> dict[str, Shape]:
    """The shape of every struct within these kinds, by its name."""
    found: dict[str, Shape] = {}

    def walk(kind: types.Type) -> None:
        if isinstance(kind, types.StructType):
            struct = kind.cls
            if struct.__qualname__ in found:
                return
            found[struct.__qualname__] = Shape(
                required=[f.encode_name for f in kind.fields if f.required],
                optional=[f.encode_name for f in kind.fields if not f.required],
                strict=kind.forbid_unknown_fields,
                terse=struct.__struct_config__.omit_defaults,
                array=kind.array_like,
            )
            for f in kind.fields:
                walk(f.type)
            return
        for part in ("type", "item_type", "key_type", "value_type"):
            if isinstance(inner := getattr(kind, part, None), types.Type):
                walk(inner)
        inners = (*getattr(kind, "types", ()), *(getattr(kind, "item_types", ()) or ()))
        for inner in inners:
            walk(inner)

    for kind in kinds:
        walk(types.type_info(kind))
    return found


def main() -> None:
    kinds = all_kinds()
    release = Release(
        version=VERSION,
        samples={
            name: [base64.b64encode(raw).decode() for raw in samples(kind)]
            for name, kind in kinds.items()
        },
        shapes=shapes(kinds.values()),
    )
    text = json.dumps(msgspec.to_builtins(release), indent=1, sort_keys=True)
    path = FOLDER / f"{VERSION}.json"
    path.write_text(text + "\n")
    print(f"wrote {path.name}: {len(kinds)} kinds, {len(release.shapes)} structs")


if __name__ == "__main__":
    main()
