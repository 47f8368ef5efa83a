"""Holds: reads the record and the body of a request that a planner wants held, waits for KV that is
fetched for it, and lets the core take it in.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import structlog

from services.worker.core.worker import WorkerCore
from services.worker.runner import Runner
from shared.bus.api import Call
from shared.clock import Clock
from shared.columns import unpack_list
from shared.errors import BusError, PeerError, StoreDamaged
from shared.prefix import salt_of
from shared.process.chores import Chores
from shared.process.logs import traced
from shared.schemas import Body, Fetch, Hold, OfferAccepted, Record
from shared.store.records import Records, Stored, in_record
from shared.vocabulary import RequestKey

log = structlog.get_logger()

# a first offer leaves beside its record, and may come here before it is stored
RECORD_PAUSES_S = (0.0005, 0.001, 0.005, 0.02)
# a body is stored before its record; a server that lacks the body is behind by less
BODY_LOST_S = 20.0
HOLDS_AT_ONCE = 64  # holds that read the store at a time; more wait their turn


class Mover(Protocol):
    """Brings KV from other workers (services/worker/kv). `address`: where they fetch KV from here.
    `move_s`: the seconds that a token's KV takes to come.
    """

    @property
    def address(self) -> str: ...

    @property
    def move_s(self) -> float: ...

    def ahead(self, key: str, tokens: Sequence[int], salt: bytes, address: str) -> None:
        """Begin to fetch the KV of a text that is still being computed there."""

    async def fetch(
        self, key: str, tokens: Sequence[int], salt: bytes, address: str, within_s: float
    ) -> int:
        """Fetch what is there, or go on with it. Returns how many positions of the text, from the
        first on, are here now.
        """

    def forget(self, key: str) -> None:
        """The request has ended: nothing of it is fetched any more."""


class Holds:
    """`taken` is called with each hold that the core has answered yes to, its record, and how many
    requests were held before; `fetched` with the positions whose KV is here after a hold has waited
    for it, and the seconds that it waited.
    """

    def __init__(
        self,
        core: WorkerCore,
        records: Records,
        runner: Runner,
        clock: Clock,
        chores: Chores,
        mover: Mover | None,
        draining: Callable[[], bool],
        taken: Callable[[Hold, Record, int], None],
        fetched: Callable[[int, float], None],
    ) -> None:
        self._core, self._records, self._runner, self._clock = core, records, runner, clock
        self._chores, self._mover, self._draining, self._taken = chores, mover, draining, taken
        self._fetched = fetched
        self._reading = asyncio.Semaphore(HOLDS_AT_ONCE)

    def on_hold(self, hold: Hold, call: Call) -> None:
        self._chores.spawn(self._hold(hold, call), "worker.hold")

    def on_fetch(self, fetch: Fetch, _call: Call) -> None:
        self._chores.spawn(self._ahead(fetch.key), "worker.fetch")

    async def _hold(self, hold: Hold, call: Call) -> None:
        if self._draining():
            await call.reply(self._core.decline(hold, "draining"))
            return
        try:
            async with self._reading:
                stored, body = await self._asked(hold)
                for pause_s in RECORD_PAUSES_S:
                    if stored is not None and body is not None:
                        break
                    await asyncio.sleep(pause_s)
                    stored, body = await self._asked(hold)
            if stored is None or body is None:
                await call.reply(self._core.decline(hold, "no such record or body"))
                return
            refused, kv_tokens = "", 0
            if isinstance(body, str):
                with traced(stored.record.traceparent):
                    log.error("body.damaged", request=hold.key, error=body)
            else:
                if (wanted := body.sampling.structured) is not None:
                    refused = await self._runner.refusal(wanted)
                at = stored.record.kv
                if self._mover is not None and at is not None and at.tokens:
                    text = _text(stored.record, body)
                    kv_tokens = await self._fetch(self._mover, at.address, hold, *text)
                    # the client may have cancelled it meanwhile
                    stored = await self._records.get(hold.key) or stored
        except (BusError, PeerError, TimeoutError) as error:
            await call.reply(self._core.decline(hold, str(error)))
            return
        if self._draining():
            await call.reply(self._core.decline(hold, "draining"))
            return
        before, now = self._core.held, self._clock.unix_s()
        answer = self._core.hold(
            hold, stored.record, body, refused, now_unix_s=now, kv_tokens=kv_tokens
        )
        if isinstance(answer, OfferAccepted):
            self._taken(hold, stored.record, before)
        await call.reply(answer)

    async def _asked(self, hold: Hold) -> tuple[Stored | None, Body | str | None]:
        """Record and body, read together where the hold names a body. A body that is damaged or
        gone for good is replaced by a text that says so; None: it may still come. A hold that names
        another body than the record is of a second copy of the request: the first may have been
        declined here for good, and must not be held after all.
        """
        if hold.body_key and not in_record(hold.body_key):
            stored, body = await asyncio.gather(
                self._records.get(hold.key), _or_words(self._records.body(hold.body_key))
            )
        else:
            stored = await self._records.get(hold.key)
            body = None
            if stored is not None:
                body = await _or_words(self._records.body_of(stored.record))
        if stored is None:
            return None, body
        record = stored.record
        if hold.body_key not in ("", record.body_key):
            return stored, None
        if body is None and self._clock.unix_s() - record.arrived_unix_s > BODY_LOST_S:
            return stored, f"{record.body_key} is missing from the store"
        return stored, body

    # ------------------------------------------------------------ KV of other replicas

    async def _fetch(
        self, mover: Mover, address: str, hold: Hold, tokens: Sequence[int], salt: bytes
    ) -> int:
        """Returns how many positions of the text are here. KV that has come ahead counts, even if
        more is not worth the time to wait for it.
        """
        began = self._clock.unix_s()
        here = await mover.fetch(hold.key, tokens, salt, address, hold.fetch_s)
        self._fetched(here, self._clock.unix_s() - began)
        return here

    async def _ahead(self, key: RequestKey) -> None:
        """The prompt is being computed at the replica that the record names, and goes on here."""
        if self._mover is None or self._draining():
            return
        try:
            stored = await self._records.get(key)
            body = None if stored is None else await self._records.body_of(stored.record)
        except (BusError, PeerError) as error:
            log.warning("fetch.late", request=key, error=str(error))
            return
        if stored is None or body is None:
            return
        record = stored.record
        if record.then == self._core.replica and record.kv is not None:
            self._mover.ahead(key, *_text(record, body), record.kv.address)


def _text(record: Record, body: Body) -> tuple[list[int], bytes]:
    """The tokens of a request, and the salt of their hashes."""
    tokens = [*unpack_list(body.prompt), *unpack_list(record.resume.tokens)]
    return tokens, salt_of(record.salt, body.adapter)


async def _or_words(reading: Awaitable[Body | None]) -> Body | str | None:
    """The body, or, if it is damaged, a text that says so."""
    try:
        return await reading
    except StoreDamaged as error:
        return error.message
