"""Runs one batch from its file to its results, at the holder of the batches' lease. Whatever ends
a run, the next holder goes on, under the same ids, with the lines that have no result.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from time import monotonic

from services.gateway.batches import lines as batch_lines
from services.gateway.batches import record as batch_record
from services.gateway.batches.asking import BatchAsker, LineAnswer, LineRequest, as_raw
from services.gateway.batches.file_store import CHUNKS_EXTRA_S, FileStore
from services.gateway.batches.lines import Numbered
from services.gateway.batches.record import BLOCK_LINES, BatchRecord, LineError
from services.gateway.batches.results import (
    ID,
    LineResponse,
    Result,
    ResultError,
    ResultFile,
    Superseded,
    id_of,
)
from services.gateway.batches.room import BatchRoom
from services.gateway.batches.store import BatchStore
from shared.clock import Clock
from shared.errors import PeerError
from shared.process import logs

LOOK_S = 1.0  # between two looks for a cancel, and two writes of the counts
LEAST_TTLT_S = 1.0
PACE_S = 0.005  # between two lines that begin: admission has other requests to take in
# the pause that follows a late turn of the loop, over the lateness: other requests come first
SPARING = 9
PAUSE_LIMIT_S = 1.0
CANCELLED = ResultError(code="batch_cancelled", message="the batch was cancelled before it ended")
EXPIRED = ResultError(
    code="batch_expired", message="the request did not end within the completion window"
)
log = logs.logger()


class BatchRun:
    def __init__(
        self,
        record: BatchRecord,
        store: BatchStore,
        files: FileStore,
        asker: BatchAsker,
        room: BatchRoom,
        clock: Clock,
    ) -> None:
        self._record = record
        self._store, self._files, self._asker = store, files, asker
        self._room, self._clock = room, clock
        self._stop = asyncio.Event()  # ask no more lines
        self._expired = False  # some line did not end within the window
        keep_s = record.expires_at - record.created_at + record.output_keep_s + CHUNKS_EXTRA_S
        self._output = ResultFile(files.objects, record.output_chunks, keep_s)
        self._errors = ResultFile(files.objects, record.error_chunks, keep_s)

    async def run(self) -> None:
        """Run to the end. Raises Superseded, BusError, PeerError; each time it may be run again."""
        if self._record.status == "validating":
            await self._validate()
        if not self._record.open:
            return
        await self._output.take_over()
        await self._errors.take_over()
        if self._record.status != "finalizing":
            await self._ask_all()
        if self._record.open:
            await self._finish()

    async def _validate(self) -> None:
        try:
            info = await self._files.find(self._record.tenant, self._record.input_file_id)
            content = self._files.content(info)
            count, errors = await batch_lines.check(content, self._record.endpoint)
        except PeerError as error:
            count, errors = 0, [LineError(code=error.code, message=error.message)]
        if errors:
            await self._fail(errors)
            return
        now = int(self._clock.unix_s())
        await self._change(lambda r: batch_record.begun(r, count, now))

    async def _change(self, step: Callable[[BatchRecord], BatchRecord | None]) -> None:
        self._record = await self._store.change(self._record, step)

    async def _fail(self, errors: list[LineError]) -> None:
        now = int(self._clock.unix_s())
        await self._change(lambda r: batch_record.failed(r, errors, now))

    async def _ask_all(self) -> None:
        """Give each line its result. Raises the first failure of its parts."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch(), name="batch.watch")
            async with asyncio.TaskGroup() as lines, aclosing(self._lines()) as left:
                async for line in left:
                    if self._stop.is_set():
                        await self._settle(line)
                    else:
                        await self._room.take(len(line.raw))
                        task = lines.create_task(self._line(line), name="batch.line")
                        # also if it never began
                        task.add_done_callback(partial(self._ended, len(line.raw)))
                        await _pause()
            watching.cancel()
        await self._count()

    async def _lines(self) -> AsyncGenerator[Numbered, None]:
        """The lines without a result, in their order. A batch whose file is gone fails."""
        done = self._output.done | self._errors.done
        if self._record.total and len(done) >= self._record.total:
            return
        try:
            info = await self._files.find(self._record.tenant, self._record.input_file_id)
        except PeerError as error:
            await self._fail([LineError(code=error.code, message=error.message)])
            return
        async for line in batch_lines.lines_of(self._files.content(info)):
            if line.number not in done:
                yield line

    async def _line(self, numbered: Numbered) -> None:
        line = batch_lines.read(numbered.raw)
        request = LineRequest(
            self._record.endpoint,
            self._record.tenant,
            id_of(self._record.id, numbered.number),
            bytes(line.body),
            await self._ttlt_s(numbered.number),
            float(self._record.expires_at),
            self._stop,
        )
        answered = await self._asker.ask(request)
        if answered is None:
            await self._settle(numbered)
        else:
            await self._keep(numbered.number, line.custom_id, answered)

    def _ended(self, size_bytes: int, _: asyncio.Task[None]) -> None:
        self._room.give(size_bytes)

    async def _ttlt_s(self, number: int) -> float:
        """A line's TTLT: the time left of the window as its block begins, stored before asking."""
        block = (number - 1) // BLOCK_LINES
        while len(self._record.ttlts_s) <= block:
            at = len(self._record.ttlts_s)
            left_s = max(LEAST_TTLT_S, round(self._record.expires_at - self._clock.unix_s(), 3))
            begin = partial(batch_record.block_begun, block=at, ttlt_s=left_s)
            await self._change(begin)
            if not self._record.open:
                raise Superseded(self._record.id)
        return self._record.ttlts_s[block]

    async def _keep(self, number: int, custom_id: str, answered: LineAnswer) -> None:
        response = LineResponse(
            status_code=answered.status, request_id=answered.request_id, body=as_raw(answered.body)
        )
        result = Result(
            id=ID + id_of(self._record.id, number),
            custom_id=custom_id,
            response=response,
            error=None,
        )
        await (self._output if answered.status == 200 else self._errors).add(result)

    async def _settle(self, numbered: Numbered) -> None:
        """Write the error of a line asked no more: the batch is cancelled, or its time is over."""
        cancelled = self._record.status == "cancelling"
        self._expired |= not cancelled
        result = Result(
            id=ID + id_of(self._record.id, numbered.number),
            custom_id=batch_lines.read(numbered.raw).custom_id,
            response=None,
            error=CANCELLED if cancelled else EXPIRED,
        )
        await self._errors.add(result)

    async def _watch(self) -> None:
        """Stop asking once the batch is cancelled or its time is over, and write the counts."""
        while True:
            await self._count()
            if self._record.status == "cancelling" or self._late:
                self._stop.set()
            left_s = self._record.expires_at - self._clock.unix_s()
            await asyncio.sleep(min(LOOK_S, max(0.05, left_s)))

    async def _count(self) -> None:
        completed, failed = len(self._output.done), len(self._errors.done)
        await self._change(lambda r: batch_record.counted(r, completed, failed))

    @property
    def _late(self) -> bool:
        return self._clock.unix_s() >= self._record.expires_at

    async def _finish(self) -> None:
        """Make files of the results, and end the batch."""
        ending, now = self._ending(), int(self._clock.unix_s())
        await self._change(lambda r: batch_record.finalizing(r, ending, now))
        ids = [
            await self._commit(results, kind)
            for results, kind in ((self._output, "output"), (self._errors, "error"))
        ]
        await self._change(lambda r: batch_record.ended(r, ids[0], ids[1], now))
        log.info(
            "batch.ended",
            batch_id=self._record.id,
            tenant=self._record.tenant,
            status=self._record.status,
            lines=self._record.total,
            completed=self._record.completed,
            failed=self._record.failed,
        )

    def _ending(self) -> str:
        if self._record.status == "cancelling":
            return "cancelled"
        # the holder before may have settled the lines
        late = self._expired or (self._stop.is_set() and bool(self._errors.done))
        return "expired" if late else "completed"

    async def _commit(self, results: ResultFile, kind: str) -> str | None:
        if not results.done:
            await self._files.objects.purge(results.chunks)
            return None
        await self._files.commit(
            self._record.tenant,
            results.chunks,
            results.digest,
            filename=f"{self._record.id}_{kind}.jsonl",
            purpose="batch_output",
            keep_s=self._record.output_keep_s,
        )
        return results.chunks


async def _pause() -> None:
    """Wait between two lines that begin, longer if the loop was late."""
    due_at_s = monotonic() + PACE_S
    await asyncio.sleep(PACE_S)
    late_s = monotonic() - due_at_s
    if late_s > PACE_S / SPARING:
        await asyncio.sleep(min(PAUSE_LIMIT_S, SPARING * late_s))
