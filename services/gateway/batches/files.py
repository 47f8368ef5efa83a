"""OpenAI's files on the wire: POST, GET and DELETE /v1/files, for batches only."""

import asyncio
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from msgspec import Struct
from starlette.requests import ClientDisconnect

from services.gateway.batches.file_room import FileRoom, Share
from services.gateway.batches.file_store import MONTH_S, FileStore, Incoming
from services.gateway.batches.store import BatchStore
from services.gateway.config import GatewayConfig
from services.gateway.http import multipart
from services.gateway.http.envelope import Problem, Rejected, saturated
from services.gateway.http.json_bytes import encode
from services.gateway.http.multipart import Began, Form
from services.gateway.http.request import CutOff, HttpRequest
from shared.errors import BusError, PeerError, StoreFull

FIELD_LIMIT = 256  # bytes of a field that is no file
FILENAME_LIMIT = 256
HOUR_S = 3600
KEEP_S = MONTH_S  # without expires_after
TOO_LARGE = Problem(status=413, message="the file is too large", code="request_too_large")
TOO_SLOW = Problem(status=400, message="the file did not arrive in time", code="body_timeout")
BROKE_OFF = Problem(status=400, message="the form has no end", code="invalid_request_error")
NO_ROOM = saturated("there is no room for more files: delete some, or wait until some expire", 30.0)
TOO_MANY_UPLOADS = saturated("the gateway takes too many files now")


class ExpiresAfter(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    anchor: str
    seconds: int

    def keep_s(self, param: str) -> int:
        """The seconds. Raises PeerError for values that OpenAI does not allow either."""
        if self.anchor != "created_at":
            raise PeerError(f"{param}.anchor must be created_at", param=f"{param}.anchor")
        if not HOUR_S <= self.seconds <= MONTH_S:
            raise PeerError(
                f"{param}.seconds must lie between {HOUR_S} and {MONTH_S}", param=f"{param}.seconds"
            )
        return self.seconds


class Page(Struct, frozen=True, kw_only=True):
    """A list as OpenAI's API shows it."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Deleted(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class Files:
    def __init__(self, cfg: GatewayConfig, store: FileStore, batches: BatchStore) -> None:
        self._cfg, self._store, self._batches = cfg, store, batches
        self._room = FileRoom(store, cfg.tenant_files_bytes, cfg.tenant_files_limit)
        self._uploads = 0

    async def create(self, http_request: HttpRequest) -> None:
        """POST /v1/files. The form is read as it comes; the file is there once it is whole."""
        if self._uploads >= self._cfg.uploads_limit:
            raise Rejected(TOO_MANY_UPLOADS)
        form = Form(multipart.boundary_of(http_request.headers.get("content-type", "")))
        incoming = self._store.incoming()
        self._uploads += 1
        try:
            async with self._room.upload(http_request.tenant) as share:
                if not share.take(0):
                    raise Rejected(NO_ROOM)
                fields, keep_s = await self._arrive(http_request, form, incoming, share)
                async with share.becoming_a_file():
                    shown = await self._store.commit(
                        http_request.tenant,
                        incoming.id,
                        incoming.digest,
                        filename=fields["file"],
                        purpose="batch",
                        keep_s=keep_s,
                    )
        except StoreFull as error:
            raise Rejected(NO_ROOM) from error
        finally:
            self._uploads -= 1
        await http_request.answer(encode(shown))

    async def _arrive(
        self, http_request: HttpRequest, form: Form, incoming: Incoming, share: Share
    ) -> tuple[dict[str, str], int]:
        """The fields, and the time to keep the file. If it fails, none of its chunks are stored."""
        try:
            async with asyncio.timeout(self._cfg.upload_within_s):
                fields = await self._read(http_request, form, incoming, share)
            keep_s = _check(fields)
            await incoming.finish(KEEP_S)
        except BaseException as error:
            share.give_back()
            if incoming.digest.chunks:
                with suppress(BusError):  # whoever runs the batches deletes them later
                    await self._store.objects.purge(incoming.id)
            if isinstance(error, TimeoutError):
                raise Rejected(TOO_SLOW) from None
            raise
        return fields, keep_s

    async def _read(
        self, http_request: HttpRequest, form: Form, incoming: Incoming, share: Share
    ) -> dict[str, str]:
        """Read the form, store the file's chunks. Returns the fields; `file`: the file's name."""
        fields: dict[str, str] = {}
        name, size = "", 0
        while not form.whole:
            message = await http_request.body()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            for piece in form.feed(message.get("body", b"")):
                if isinstance(piece, Began):
                    name = piece.name
                    if name in fields:
                        raise PeerError(f"the form has {name[:64]!r} twice", param=name[:64])
                    fields[name] = ""
                    if name == "file":
                        fields[name] = (piece.filename or "")[:FILENAME_LIMIT]
                elif name == "file":
                    size += len(piece.data)
                    if size > self._cfg.file_limit_bytes:
                        raise Rejected(TOO_LARGE)
                    if not share.take(len(piece.data)):
                        raise Rejected(NO_ROOM)
                    await incoming.take(piece.data, KEEP_S)
                else:
                    fields[name] += piece.data.decode("utf-8", "replace")
                    if len(fields[name]) > FIELD_LIMIT:
                        raise PeerError(f"{name[:64]} is too long", param=name[:64])
            if not message.get("more_body", False) and not form.whole:
                raise Rejected(BROKE_OFF)
        return fields

    async def list(self, http_request: HttpRequest) -> None:
        """GET /v1/files"""
        query = Query(http_request.query_string, ("after", "limit", "order", "purpose"))
        found = await self._store.of_tenant(http_request.tenant)
        purpose = query.one("purpose")
        if purpose is not None:
            found = [file for file in found if file.purpose == purpose]
        if query.choice("order", ("asc", "desc")) == "asc":
            found.reverse()
        await http_request.answer(encode(query.page(found, 10_000)))

    async def show(self, http_request: HttpRequest) -> None:
        """GET /v1/files/ID"""
        shown = await self._store.shown(http_request.tenant, http_request.path_params["file_id"])
        await http_request.answer(encode(shown))

    async def delete(self, http_request: HttpRequest) -> None:
        """DELETE /v1/files/ID"""
        file_id = http_request.path_params["file_id"]
        info = await self._store.find(http_request.tenant, file_id)
        for record in await self._batches.open(http_request.tenant):
            if record.open and record.input_file_id == file_id:
                raise PeerError(
                    f"the batch {record.id} reads this file: cancel it first", code="conflict"
                )
        await self._store.objects.delete(info)
        await http_request.answer(encode(Deleted(id=file_id)))

    async def content(self, http_request: HttpRequest) -> None:
        """GET /v1/files/ID/content, chunk by chunk: a slow reader costs some megabytes."""
        info = await self._store.find(http_request.tenant, http_request.path_params["file_id"])
        headers = [
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(info.size).encode()),
        ]
        await http_request.send({"type": "http.response.start", "status": 200, "headers": headers})
        sent = 0
        try:
            async for chunk in self._store.content(info):
                async with asyncio.timeout(self._cfg.stall_s):
                    await http_request.send(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                sent += len(chunk)
        except (TimeoutError, BusError) as error:
            raise CutOff from error
        if sent != info.size:  # it expires just now
            raise CutOff
        await http_request.send({"type": "http.response.body", "body": b""})


def _check(fields: dict[str, str]) -> int:
    """The seconds for which the file is kept. Raises PeerError for wrong fields."""
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in fields:
        if name not in known:
            raise PeerError(f"unknown field {name[:64]!r}", param=name[:64])
    for name in ("file", "purpose"):
        if name not in fields:
            raise PeerError(f"the form lacks {name}", param=name)
    if fields["purpose"] != "batch":
        raise PeerError(
            "purpose is not supported, except as batch",
            code="unsupported_parameter",
            param="purpose",
        )
    if not fields.keys() & {"expires_after[anchor]", "expires_after[seconds]"}:
        return KEEP_S
    seconds = fields.get("expires_after[seconds]", "")
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 10):
        raise PeerError("expires_after.seconds must be a number", param="expires_after.seconds")
    anchor = fields.get("expires_after[anchor]", "")
    return ExpiresAfter(anchor=anchor, seconds=int(seconds)).keep_s("expires_after")


class Query:
    """The parameters behind the `?`. Raises PeerError for one that is not known, or comes twice."""

    def __init__(self, raw: bytes, known: tuple[str, ...]) -> None:
        try:
            found = parse_qs(raw.decode(), keep_blank_values=True, max_num_fields=32)
        except ValueError:
            raise PeerError("malformed query") from None
        for name, values in found.items():
            if name not in known or len(values) > 1:
                raise PeerError(
                    f"{name[:64]!r} is no parameter here, or is given twice", param=name[:64]
                )
        self._values = {name: values[0] for name, values in found.items()}

    def one(self, name: str) -> str | None:
        return self._values.get(name)

    def choice(self, name: str, values: tuple[str, ...]) -> str | None:
        given = self.one(name)
        if given is not None and given not in values:
            raise PeerError(f"{name} must be one of {', '.join(values)}", param=name)
        return given

    def page(self, found: list[Any], most: int, usual: int | None = None) -> Page:
        """The page of a list that `after` and `limit` ask for."""
        limit = self.one("limit")
        if limit is not None and not (
            limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= most
        ):
            raise PeerError(f"limit must be a number between 1 and {most}", param="limit")
        count, after = int(limit) if limit else usual or most, self.one("after")
        if after is not None:
            at = next((n for n, one in enumerate(found) if one.id == after), None)
            if at is None:
                raise PeerError("after names nothing in this list", param="after")
            found = found[at + 1 :]
        data = found[:count]
        return Page(
            data=data,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
            has_more=len(found) > len(data),
        )
