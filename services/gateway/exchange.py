"""The life of one completion: submitted, answered, and cancelled if its client leaves before the end.

Stateless: whatever happens here, the request itself goes on in the fleet, and the same x-request-id attaches to it again, through
any gateway. Only a client that hangs up (or reads nothing for `stall_s`) ends its request.
"""

import asyncio
import contextlib

from starlette.types import Receive, Send

from services.gateway.answer import Answer, ReaderStalled
from services.gateway.config import GatewayConfig
from services.gateway.fleet import Fleet
from services.gateway.intake import Ask
from shared import conventions, logs, subjects, telemetry
from shared.bus.api import RefusedError
from shared.client import Client, Handle
from shared.clock import Clock
from shared.errors import BusError, PeerError, SlacklineError

CANCEL_WITHIN_S = 10.0  # how long a cancel is repeated before the request is left to its expiry
log = logs.logger()


class Exchanges:
    """What all completions share. Cancels outlive their connection: they run in `tasks`."""

    def __init__(
        self, cfg: GatewayConfig, client: Client, fleet: Fleet, clock: Clock, tracing: telemetry.Tracing, tasks: asyncio.TaskGroup
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._tracing = tracing
        self._tasks = tasks

    async def run(self, ask: Ask, traceparent: str | None, receive: Receive, send: Send, began_unix_s: float) -> bool:
        """Submit, answer, and see the request ended if its client leaves first: True then.

        Raises PeerError or BusError, if nothing has been answered yet.
        """
        request = ask.request
        model = request.model or self._fleet.default_model()
        attributes: dict[str, telemetry.AttributeValue] = {
            conventions.OPERATION: "text_completion",
            conventions.PROVIDER: conventions.PROVIDER_NAME,
            conventions.REQUEST_MODEL: model,
            conventions.REQUEST_MAX_TOKENS: request.sampling.max_tokens,
            conventions.REQUEST_TIER: ask.service_tier,
            conventions.REQUEST_KEY: subjects.request_key(request.tenant, request.request_id),
        }
        parent = traceparent if telemetry.TraceParent.parse(traceparent) else None
        span = self._tracing.start(f"text_completion {model}".rstrip(), parent, attributes, at_unix_s=began_unix_s, kind="server")
        handle: Handle | None = None
        answer: Answer | None = None
        gone = False
        error_type = ""
        try:
            handle = await self._submit(ask, span.traceparent)
            answer = Answer(
                ask,
                handle,
                send,
                model=model,
                created_unix_s=began_unix_s,
                keepalive_s=self._cfg.keepalive_s,
                stall_s=self._cfg.stall_s,
            )
            gone = await _run_until_gone(answer, receive) and not answer.over
        except SlacklineError as error:
            error_type = error.code if isinstance(error, PeerError) else type(error).__name__
            raise
        finally:
            if handle is not None:
                if gone:
                    self._tasks.create_task(_cancel(handle), name="gateway.cancel")
                else:
                    handle.close()
            self._tell(ask, answer, gone, error_type, span, began_unix_s)
        return gone

    async def _submit(self, ask: Ask, traceparent: str) -> Handle:
        """Raises RefusedError, BusError."""
        try:
            return await self._client.submit(ask.request, ask.tier, headers={telemetry.TRACEPARENT: traceparent} if traceparent else None)
        except RefusedError:
            raise
        except PeerError as error:  # the answer was no answer: not the fault of the one who asked
            raise BusError(error.message) from error

    def _tell(self, ask: Ask, answer: Answer | None, gone: bool, error_type: str, span: telemetry.Span, began_unix_s: float) -> None:
        """The request's one line in the log, and the end of its span."""
        verdict = None if answer is None else answer.verdict
        if verdict is not None:
            tokens = {conventions.INPUT_TOKENS: verdict.prompt_tokens, conventions.OUTPUT_TOKENS: verdict.output_tokens}
            span.set(**tokens, **{conventions.FINISH_REASONS: [verdict.finish_reason.value]})
        if answer is not None:
            span.set(**{conventions.RESPONSE_TIER: answer.service_tier})
        if error_type:
            span.set(**{conventions.ERROR_TYPE: error_type})
        span.end()
        log.info(
            "request.served",
            request_id=ask.request.request_id,
            tenant=ask.request.tenant,
            tier=ask.tier,
            status=0 if answer is None else answer.status,
            finish_reason=None if verdict is None else verdict.finish_reason.value,
            relegated=None if verdict is None else verdict.relegated,
            hung_up=gone,
            error=error_type or None,
            duration_s=round(self._clock.unix_s() - began_unix_s, 6),
        )


async def _run_until_gone(answer: Answer, receive: Receive) -> bool:
    """True if the client left before its answer was complete."""
    gone = False

    async def watch(answering: asyncio.Task[None]) -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        answering.cancel()

    async def run() -> None:
        nonlocal gone
        try:
            await answer.run()
        except ReaderStalled:
            gone = True

    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(run(), name="gateway.answer")
        watching = tasks.create_task(watch(answering), name="gateway.watch")
        await asyncio.wait({answering})
        watching.cancel()
    return gone


async def _cancel(handle: Handle) -> None:
    """Cancel, and listen until the end: the handle says it again as long as it listens."""
    try:
        with contextlib.suppress(TimeoutError, SlacklineError):
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await handle.cancel("the client hung up")
                async for _ in handle:
                    pass
    finally:
        handle.close()
