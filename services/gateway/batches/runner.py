"""Runs the open batches of all tenants, at the gateway that has the lease; others stand by."""

import asyncio
from collections import Counter
from contextlib import suppress
from uuid import uuid4

from services.gateway.batches import record as batch_record
from services.gateway.batches.asking import BatchAsker
from services.gateway.batches.file_store import FileStore
from services.gateway.batches.record import BatchRecord
from services.gateway.batches.results import Superseded
from services.gateway.batches.room import BatchRoom
from services.gateway.batches.run import BatchRun
from services.gateway.batches.store import BatchStore
from services.gateway.config import GatewayConfig
from shared.bus.api import Bus
from shared.clock import Clock
from shared.errors import BusError, PeerError
from shared.process import logs
from shared.rules.rules import Rules
from shared.store.leases import RENEW_S, Leader, Lease
from shared.store.presence import Absences, be_present

KEY = "batches"
AT_ONCE = 16  # batches that run together: the reading buffer of each takes 8 MiB
TIDY_S = 900.0  # between two looks for chunks that nobody needs: longer than an upload may take
log = logs.logger()


class BatchRunner:
    def __init__(
        self,
        cfg: GatewayConfig,
        bus: Bus,
        store: BatchStore,
        files: FileStore,
        asker: BatchAsker,
        clock: Clock,
        rules: Rules,
    ) -> None:
        self._bus, self._clock, self._rules = bus, clock, rules
        self._store, self._files, self._asker = store, files, asker
        self._room = BatchRoom(cfg.batch_requests_limit, cfg.bodies_limit_bytes)
        self.name = f"gateway-{uuid4().hex[:12]}"
        lease = Lease(bus.leases, KEY, self.name, Absences(bus, clock))
        self._leader = Leader(lease, clock)
        self._running: dict[str, tuple[BatchRecord, asyncio.Task[None]]] = {}
        self._orphans: set[str] = set()  # chunks that the last look found without use
        self._nameless: set[str] = set()  # likewise entries of the index without a file
        self._tidied_unix_s = 0.0

    async def run(self) -> None:
        """Run until cancelled. Requests under way then go on; the next holder attaches to them."""
        present = await be_present(self._bus, self.name)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    if await self._leader.look():
                        log.info("batches.led", instance=self.name)
                    if self._leader.leads:
                        with suppress(BusError):
                            await self._look(tasks)
                    else:
                        self._stand_by()
                    await asyncio.sleep(self._leader.pause_s)
        finally:
            await self._leader.resign()
            await present.stop()

    def _stand_by(self) -> None:
        for _, task in self._running.values():
            task.cancel()
        self._running.clear()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Start the open batches, AT_ONCE at most: first of the tenants that have the fewest."""
        self._running = {n: it for n, it in self._running.items() if not it[1].done()}
        found = await self._store.open()
        await self._cancel_revoked(found)
        waiting = [record for record in found if record.id not in self._running]
        for record in [record for record in waiting if not record.open]:
            waiting.remove(record)
            try:
                await self._store.tidy(record)
            except PeerError as error:
                log.error("batch.damaged", batch_id=record.id, error=error.message)
        while waiting and len(self._running) < AT_ONCE:
            running = Counter(record.tenant for record, _ in self._running.values())
            chosen = min(waiting, key=lambda r: (running[r.tenant], r.created_at, r.id))
            waiting.remove(chosen)
            task = tasks.create_task(self._run(chosen), name="gateway.batch")
            self._running[chosen.id] = (chosen, task)
        await self._tidy(found)

    async def _cancel_revoked(self, found: list[BatchRecord]) -> None:
        """Cancel the batches of tenants that have no key any more."""
        keys = self._rules.keys
        if keys is None:
            return
        tenants, now = keys.tenants, int(self._clock.unix_s())
        for record in found:
            if record.tenant not in tenants:
                with suppress(PeerError):  # it ends just now
                    await self._store.change(record, lambda r: batch_record.cancelled(r, now))

    async def _run(self, record: BatchRecord) -> None:
        """Run a batch. Whatever stops the run, the next look starts it again."""
        run = BatchRun(record, self._store, self._files, self._asker, self._room, self._clock)
        try:
            await run.run()
        except* (BusError, PeerError, Superseded) as errors:
            for error in errors.exceptions:
                log.warning("batch.stopped", batch_id=record.id, error=repr(error)[:500])
            await asyncio.sleep(RENEW_S)

    async def _tidy(self, found: list[BatchRecord]) -> None:
        """Delete chunks without a file: uploads that broke off, and the last chunks of batches
        whose holder changed in their last moment. Delete names of the index without a file.
        """
        now = self._clock.unix_s()
        if now - self._tidied_unix_s < TIDY_S:
            return
        self._tidied_unix_s = now
        used = {name for record in found for name in (record.output_chunks, record.error_chunks)}
        stored = set(await self._files.objects.stored_chunks())
        try:
            whole = await self._files.objects.all()
            named = {info.name for info in await self._files.objects.named()}
            nameless = named - {info.name for info in whole}
            for name in nameless & self._nameless:
                await self._files.objects.unindex(name)
        except PeerError as error:
            log.error("files.damaged", error=error.message)
            return
        self._nameless = nameless
        orphans = stored - {info.nuid for info in whole} - used
        for chunks in orphans & self._orphans:
            try:
                await self._files.objects.purge(chunks)
            except PeerError as error:  # no file of ours has such a name
                log.error("files.damaged", error=error.message)
        self._orphans = orphans
