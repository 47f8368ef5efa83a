"""Tests of stored records that no service of ours wrote: they are left alone and stop nothing."""

import asyncio
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shared.columns import pack
from shared.core.record import record as life
from shared.errors import BusTimeout, PeerError
from shared.schemas import Record, Resume
from shared.store.outputs import FRESH_S
from shared.store.records import WHOLE_EVERY_S, Records
from shared.vocabulary import RequestKey
from tests import made
from tests.simulated.broker import Faults
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing


def record(key: str) -> Record:
    return made.record(key, expires_unix_s=1.0, prompt_tokens=1, max_tokens=1)


@virtual()
async def test_a_record_of_another_key_than_its_own_is_not_read_and_hides_no_other() -> None:
    """The sweep takes the keys of records as they are: one that is no key would stop it."""
    bus: Any = SimNet(Random(0), Faults()).connect("test")
    for name, key in (("s.t.a", "t.a"), ("s.t.b", "t.a"), ("s.t.c", "a >.*"), ("s.t.d", "t.d")):
        await bus.requests.create(name, msgspec.msgpack.encode(record(key)))
    records = Records(bus.requests, bus.bodies)
    assert sorted(stored.record.key for stored in await records.open()) == ["t.a", "t.d"]
    for key in ("t.b", "t.c"):
        with pytest.raises(PeerError):
            await records.get(RequestKey(key))


@virtual()
async def test_an_output_in_doubt_whose_record_is_damaged_keeps_no_other_from_being_deleted() -> (
    None
):
    net = SimNet(Random(0), Faults())
    bus: Any = net.connect("test")
    records, update = Records(bus.requests, bus.bodies), net.requests.update

    def unanswered(*_: Any, **__: Any) -> int:
        raise BusTimeout("no answer")

    for name in ("a", "b"):
        made = replace(
            record(f"t.{name}"), resume=Resume(tokens=pack(range(200)), text="ab"), cancelled=True
        )
        await bus.requests.create(f"s.t.{name}", msgspec.msgpack.encode(made))
        net.requests.update = unanswered  # type: ignore[method-assign]
        with pytest.raises(BusTimeout):
            await records.change(made.key, lambda seen: life.closed(seen, 0.0))
        net.requests.update = update  # type: ignore[method-assign]
    assert len(await records.outputs()) == 2
    entry = await bus.requests.get("s.t.a")
    await bus.requests.update("s.t.a", b"?", entry.revision)
    await records.change(RequestKey("t.b"), lambda seen: life.closed(seen, 0.0))
    await asyncio.sleep(FRESH_S + 1.0)
    await records.tidy()
    stored = await records.get(RequestKey("t.b"))
    assert stored is not None
    left = {key for key, _ in await bus.requests.scan("o.")} - {stored.record.output_key}
    assert sorted(key.rpartition(".")[0] for key in left) == ["o.t.a"]


@virtual()
async def test_a_listing_reads_what_ended_before_the_oldest_open_record_no_more() -> None:
    bus: Any = SimNet(Random(0), Faults()).connect("test")
    records, others = Records(bus.requests, bus.bodies), Records(bus.requests, bus.bodies)
    for name in ("t.a", "t.b"):
        made = replace(record(name), cancelled=True)
        await bus.requests.create(f"s.{name}", msgspec.msgpack.encode(made))

    async def seen(*, whole: bool = False) -> tuple[list[str], list[str]]:
        listing = await records.listing(whole=whole)
        return [stored.record.key for stored in listing.open], sorted(listing.others)

    await others.change(RequestKey("t.a"), lambda one: life.closed(one, 0.0))
    assert await seen() == (["t.b"], ["t.a"])
    assert await seen() == (["t.b"], ["t.a"]), "it ended after `t.b` was written"
    await others.change(RequestKey("t.b"), lambda one: replace(one, left="x"))
    assert await seen() == (["t.b"], ["t.a"])
    assert await seen() == (["t.b"], [])
    await others.change(RequestKey("t.b"), lambda one: life.closed(one, 0.0))
    assert await seen() == ([], ["t.b"]), "what was open is listed once more"
    assert await seen() == ([], [])
    assert await seen(whole=True) == ([], ["t.a", "t.b"])
    await asyncio.sleep(WHOLE_EVERY_S)
    assert await seen() == ([], ["t.a", "t.b"])
