"""Sends planned requests over HTTP: POST /v1/completions, streaming, as any OpenAI client would."""

import os
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any

import httpx
import msgspec

from loadgen.load.tally import Outcome
from loadgen.load.texts.prompts import Prompts
from shared.client.client import Now
from shared.errors import UNDECODABLE, BusError, ConfigError
from shared.rules.tiers import TierSet
from shared.vocabulary import FinishReason


class HttpSender:
    """Sends the tier by name (for our gateway) and as `service_tier`, and its bounds as headers, so
    that both ends hold the same SLO.

    HTTP cannot say that the model would stop here: the output's length is sent as max_tokens, which
    the server then knows. With a key in SLACKLINE_API_KEY all requests are its tenant's.
    """

    def __init__(
        self, url: str, model: str | None, tiers: TierSet, clock: Now, *, seed: int
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--http `{url}`: expected http://HOST:PORT")
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),  # the base URL of OpenAI's clients has it
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self._key = os.environ.get("SLACKLINE_API_KEY", "")
        self._model = model
        self._tiers = tiers
        self._clock = clock
        self._prompts = Prompts(seed)

    async def check(self) -> None:
        """Raises BusError if nothing answers at the address; any status will do."""
        try:
            await self._http.get("/health")
        except httpx.HTTPError as error:
            raise BusError(
                f"nothing answers at {self._http.base_url} ({error}): "
                f"start a fleet with `slackline up`"
            ) from error

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, outcome: Outcome) -> None:
        """Send a request, and read until the answer has ended. Cancelling this call closes the
        connection, which cancels the request.
        """
        planned, slo = outcome.planned, outcome.slo
        bounds = {
            "x-llm-d-slo-ttft-ms": slo.ttft_s,
            "x-llm-d-slo-tpot-ms": slo.tbt_s,
            "x-slackline-slo-ttlt-ms": slo.ttlt_s,
            "x-slackline-slo-task-ttlt-ms": slo.task_ttlt_s,
        }
        headers = {
            name: "none" if bound_s is None else f"{1000 * bound_s:g}"
            for name, bound_s in bounds.items()
        }
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        else:
            headers["x-llm-d-inference-fairness-id"] = planned.tenant
        headers["x-slackline-tier"] = planned.tier
        headers["x-slackline-application"] = planned.application
        body: dict[str, Any] = {
            "prompt": self._prompts.ids(planned),
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "priority": round(planned.importance - 1),  # the gateway's weight is priority + 1
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if planned.session:
            body["user"] = planned.session
        if self._model is not None:
            body["model"] = self._model
        service_tier = self._tiers.tiers[planned.tier].service_tier
        if service_tier is not None:
            body["service_tier"] = service_tier
        try:
            async with self._http.stream(
                "POST", "/v1/completions", json=body, headers=headers
            ) as response:
                if response.status_code != httpx.codes.OK:
                    self._refused(outcome, response.status_code, await response.aread())
                    return
                async for data in events(response.aiter_bytes()):
                    self._read(outcome, data)
            outcome.end("error", "the answer broke off without an end")
        except (httpx.HTTPError, *UNDECODABLE) as error:
            outcome.end("error", f"{type(error).__name__}: {error}")

    def _refused(self, outcome: Outcome, status: int, raw: bytes) -> None:
        try:
            error = msgspec.json.decode(raw)["error"]
            outcome.refuse(str(error.get("code") or status), str(error.get("message", "")))
        except (*UNDECODABLE, KeyError, TypeError, AttributeError):
            outcome.end("error", f"HTTP {status}: {raw[:200].decode(errors='replace')}")

    def _read(self, outcome: Outcome, data: bytes) -> None:
        """Read one server-sent event. Its tokens are counted by `token_ids`; where a server sends
        none, a piece of text counts as one token. Raises msgspec.DecodeError.
        """
        if data.strip() == b"[DONE]":
            return
        chunk = _read_chunk(data)
        if isinstance(chunk.error, dict):
            outcome.refuse(str(chunk.error.get("code")), str(chunk.error.get("message")))
            return
        if chunk.error or chunk.object == "error":
            outcome.end("error", str(chunk.error or chunk.message))
            return
        now_unix_s = self._clock.unix_s()
        asked_for = self._tiers.tiers[outcome.planned.tier].service_tier
        outcome.relegated = outcome.relegated or (
            chunk.service_tier == "flex" and asked_for != "flex"
        )
        for choice in chunk.choices or ():
            ids = choice.token_ids
            self._prompts.answered(outcome.planned, ids or ())
            outcome.emit(len(ids) if ids is not None else int(bool(choice.text)), now_unix_s)
            if choice.finish_reason:
                known = choice.finish_reason in tuple(FinishReason)
                outcome.end(choice.finish_reason if known else FinishReason.FAILED)


class Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: Any = None


class Chunk(msgspec.Struct):
    """The part of an event that is read here; other servers leave out and add a lot."""

    choices: list[Choice] | None = None
    service_tier: str | None = None
    error: Any = None
    object: str = ""
    message: str = ""


_read_chunk = msgspec.json.Decoder(Chunk).decode


async def events(parts: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Lines end at LF or CR LF: a text may have others."""
    unread, data = b"", list[bytes]()
    async for part in parts:
        *lines, unread = (unread + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []
    if unread.startswith(b"data:"):  # cut off, or its end has no line
        data.append(unread[5:].strip())
    if data:
        yield b"\n".join(data)
