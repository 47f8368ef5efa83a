"""Calls for the KV of an engine, made in its turn, between two iterations. The bytes lie in rows of
the worker's shelf.
"""

import time
from collections.abc import Sequence

import msgspec

from services.worker.engine import Engine, KvName, Lacking
from services.worker.engines.shelf import OpenShelf, ShelfAt


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask for what the engine lacks of this text."""

    tokens: Sequence[int]
    salt: bytes


class TakeOut(msgspec.Struct, frozen=True, tag=True):
    """Copy these blocks to these rows."""

    shelf: ShelfAt
    digests: Sequence[bytes]
    rows: Sequence[int]


class BringIn(msgspec.Struct, frozen=True, tag=True):
    """Keep these blocks, which lie in these rows."""

    shelf: ShelfAt
    names: Sequence[KvName]
    rows: Sequence[int]


KvCall = Look | TakeOut | BringIn


class KvAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to any of them, and the seconds that the engine took."""

    took_s: float
    lacking: Lacking = Lacking(0, ())
    there: Sequence[bool] = ()  # of each block: it was copied, or is known now


class KvCalls:
    """Makes the calls of one worker to its engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._at: ShelfAt | None = None  # the shelf that is open

    def run(self, call: KvCall) -> KvAnswer:
        began_s, there, lacking = time.monotonic(), list[bool](), Lacking(0, ())
        match call:
            case Look():
                lacking = self._engine.lacking(call.tokens, call.salt)
            case TakeOut():
                there = self._engine.take_out(call.digests, self._views(call.shelf, call.rows))
            case BringIn():
                there = self._engine.bring_in(call.names, self._views(call.shelf, call.rows))
        return KvAnswer(took_s=time.monotonic() - began_s, lacking=lacking, there=there)

    def _views(self, at: ShelfAt, rows: Sequence[int]) -> list[memoryview]:
        facts = self._engine.facts.kv
        assert facts is not None, "the engine's KV does not move"
        if at != self._at:
            self._at, self._shelf = at, OpenShelf(at, facts.block_bytes)
        return self._shelf.views(rows)
