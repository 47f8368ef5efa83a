"""OpenAI's batches on the wire: POST and GET /v1/batches."""

import re
from hashlib import sha256
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
from msgspec import Meta, Struct

from services.gateway.api import asking
from services.gateway.api.asking import ShortString
from services.gateway.batches import record as batch_record
from services.gateway.batches.file_store import MONTH_S, FileStore
from services.gateway.batches.files import ExpiresAfter, Query
from services.gateway.batches.record import BatchRecord, shown
from services.gateway.batches.store import BatchStore
from services.gateway.http import headers as request_headers
from services.gateway.http.envelope import Rejected, saturated
from services.gateway.http.json_bytes import encode
from services.gateway.http.request import HttpRequest
from shared.clock import Clock
from shared.errors import PeerError, StoreFull

OPEN_LIMIT = 64  # batches of one tenant at one time
UNITS_S = {"s": 1, "m": 60, "h": 3600}
WINDOW_LIMIT_S = 7 * 86_400
TOO_MANY = saturated(f"this tenant has {OPEN_LIMIT} open batches: wait until one ends", 30.0)
NO_ROOM = saturated("there is no room for more batches", 30.0)


class BatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of requests, and the time within which they end: OpenAI's `24h`, or another one."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: ShortString
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


_BODY = msgspec.json.Decoder(BatchBody)
WINDOW = re.compile(r"([1-9][0-9]{0,5})([smh])")


class Batches:
    def __init__(self, store: BatchStore, files: FileStore, clock: Clock) -> None:
        self._store, self._files, self._clock = store, files, clock

    async def create(self, http_request: HttpRequest) -> None:
        """POST /v1/batches. With an Idempotency-Key it makes one batch, however often it comes."""
        named = request_headers.IDEMPOTENCY_KEY in http_request.headers
        if named:
            http_request.request_id = request_headers.read_request_id(http_request.headers)
        body = asking.read(_BODY, await http_request.read(), {})
        record = self._record(http_request, body, named=named)
        file = await self._files.shown(http_request.tenant, body.input_file_id)
        if file.purpose != "batch":
            raise PeerError("the purpose of the file is not batch", param="input_file_id")
        if file.expires_at is not None and file.expires_at < record.expires_at:
            raise PeerError("the file expires before the batch may end", param="input_file_id")
        if sum(r.open for r in await self._store.open(http_request.tenant)) >= OPEN_LIMIT:
            raise Rejected(TOO_MANY)
        try:
            made = await self._store.create(record)
        except StoreFull as error:
            raise Rejected(NO_ROOM) from error
        if not made:
            before = await self._store.get(http_request.tenant, record.id)
            if before is None or _asked(before) != _asked(record):
                raise PeerError(
                    "another batch has this Idempotency-Key",
                    code="conflict",
                    param=request_headers.IDEMPOTENCY_KEY,
                )
            record = before
        await http_request.answer(encode(shown(record)))

    async def show(self, http_request: HttpRequest) -> None:
        """GET /v1/batches/ID"""
        await http_request.answer(encode(shown(await self._find(http_request))))

    async def cancel(self, http_request: HttpRequest) -> None:
        """POST /v1/batches/ID/cancel"""
        await http_request.read()
        record, now = await self._find(http_request), int(self._clock.unix_s())
        if record.open:
            record = await self._store.change(record, lambda r: batch_record.cancelled(r, now))
        if record.status not in ("cancelling", "cancelled"):
            batch_record.cancelled(record, now)  # says why not
        await http_request.answer(encode(shown(record)))

    async def list(self, http_request: HttpRequest) -> None:
        """GET /v1/batches"""
        query = Query(http_request.query_string, ("after", "limit"))
        page = query.page(await self._store.of_tenant(http_request.tenant), 100, 20)
        page = msgspec.structs.replace(page, data=[shown(record) for record in page.data])
        await http_request.answer(encode(page))

    async def _find(self, http_request: HttpRequest) -> BatchRecord:
        record = await self._store.get(http_request.tenant, http_request.path_params["batch_id"])
        if record is None:
            raise PeerError("no such batch", code="not_found", param="batch_id")
        return record

    def _record(self, http_request: HttpRequest, body: BatchBody, *, named: bool) -> BatchRecord:
        window = WINDOW.fullmatch(body.completion_window)
        if window is None:
            raise PeerError(
                "completion_window must be a time such as `24h` or `90m`", param="completion_window"
            )
        window_s = int(window[1]) * UNITS_S[window[2]]
        if window_s > WINDOW_LIMIT_S:
            raise PeerError("completion_window is a week at most", param="completion_window")
        keep_s = MONTH_S
        if body.output_expires_after is not None:
            keep_s = body.output_expires_after.keep_s("output_expires_after")
        now = int(self._clock.unix_s())
        key = f"{http_request.tenant}.{http_request.request_id}"
        digits = sha256(key.encode()).hexdigest()[:32] if named else uuid4().hex
        return BatchRecord(
            id=f"batch_{digits}",
            tenant=http_request.tenant,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            output_keep_s=keep_s,
            metadata=body.metadata or {},
        )


def _asked(record: BatchRecord) -> tuple[str, str, str, int, dict[str, str]]:
    """The fields of a batch that its tenant chose."""
    return (
        record.input_file_id,
        record.endpoint,
        record.completion_window,
        record.output_keep_s,
        record.metadata,
    )
