"""The life of one answer: its requests are submitted, answered, and cancelled together. The gateway
is stateless: if it stops, requests go on in the fleet, and the same Idempotency-Key attaches to
them through any gateway. They are cancelled if the client hangs up (or reads nothing for
`stall_s`), or if one of them fails.
"""

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from starlette.types import Receive, Send

from services.gateway.api.alive import Fleet
from services.gateway.api.answer import Answer, ReaderStalled
from services.gateway.api.chats import WHATEVER_FITS
from services.gateway.api.translate import Ask
from services.gateway.config import GatewayConfig
from services.gateway.http import envelope
from services.gateway.telemetry.gen_ai import GenAi, Operation
from shared import subjects
from shared.bus.api import RefusedError
from shared.client.client import Client, Handle
from shared.clock import Clock
from shared.errors import BusError, PeerError, SlacklineError, Unsendable
from shared.process import logs
from shared.schemas import GenerateRequest
from shared.telemetry import conventions, telemetry

CANCEL_WITHIN_S = 10.0  # a cancel is repeated this long; then the request is left to its expiry
# a cancel that comes before its request is stored finds nothing
WITHDRAWALS, WITHDRAW_EACH_S = 4, 1.0
UNKNOWN_MODEL = "unknown"
log = logs.logger()


class Generations:
    """Runs the answers of one gateway. Cancels outlive their connection: they run in `tasks`."""

    def __init__(
        self,
        cfg: GatewayConfig,
        client: Client,
        fleet: Fleet,
        clock: Clock,
        tracing: telemetry.Tracing,
        gen_ai: GenAi,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._cfg = cfg
        self._client = client
        self._fleet = fleet
        self._clock = clock
        self._tracing, self._gen_ai = tracing, gen_ai
        self._tasks = tasks
        self._answers: dict[Answer, tuple[str, asyncio.Task[None]]] = {}  # with the tenant

    def end_all_but(self, tenants: Collection[str]) -> None:
        """End the answers to all other tenants: their keys were revoked."""
        for answer, (tenant, answering) in self._answers.items():
            if tenant not in tenants:
                answer.problem = envelope.UNKNOWN_KEY
                answering.cancel()

    async def run(
        self, ask: Ask, traceparent: str | None, receive: Receive, send: Send, began_unix_s: float
    ) -> bool:
        """Submits and answers. True: the client left first, and its requests were ended. Raises
        PeerError or BusError if nothing has been answered yet.
        """
        model = ask.model or self._fleet.default_model()
        # a name that no replica has may be anything: it is no model
        known = self._fleet.meant(model) if self._fleet.knows(model) else UNKNOWN_MODEL
        span = self._span(ask, known, traceparent, began_unix_s)
        handles: list[Handle] = []
        answer: Answer | None = None
        gone = False
        error_type = ""
        try:
            handles = await self._submit(ask, span.traceparent)
            answer = Answer(
                ask,
                handles,
                send,
                default_model=self._fleet.default_model,
                created_unix_s=began_unix_s,
                keepalive_s=self._cfg.keepalive_s,
                stall_s=self._cfg.stall_s,
            )
            gone = await self._run_until_gone(ask.tenant, answer, receive) and not answer.over
            if answer.problem is not None:
                error_type = answer.problem.code
        except SlacklineError as error:
            error_type = error.code if isinstance(error, PeerError) else type(error).__name__
            raise
        finally:
            if gone:
                self._cancel(handles, "the client hung up")
            elif (
                answer is not None
                and answer.problem is not None
                and not (answer.lost and ask.persistent)
            ):
                self._cancel(handles, "another choice of the same request failed")
            else:
                for handle in handles:
                    handle.close()
            self._log_end(ask, answer, gone, error_type, span, began_unix_s)
            verdicts = [] if answer is None else answer.verdicts.values()
            self._gen_ai.record(
                Operation(
                    ask.api_format.operation,
                    known,
                    self._clock.unix_s() - began_unix_s,
                    "cancelled" if gone else error_type,
                    [(verdict.ttft_s, verdict.mean_tpot_s) for verdict in verdicts],
                )
            )
        return gone

    async def _run_until_gone(self, tenant: str, answer: Answer, receive: Receive) -> bool:
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
            self._answers[answer] = tenant, answering
            watching = tasks.create_task(watch(answering), name="gateway.watch")
            try:
                await asyncio.wait({answering})
            finally:
                del self._answers[answer]
            if answering.cancelled() and answer.problem is not None:
                with contextlib.suppress(ReaderStalled):
                    await answer.fail(answer.problem)
            watching.cancel()
        return gone

    def _span(
        self, ask: Ask, model: str, traceparent: str | None, began_unix_s: float
    ) -> telemetry.Span:
        operation, max_tokens = ask.api_format.operation, ask.requests[0].sampling.max_tokens
        attributes: dict[str, telemetry.AttributeValue] = {
            conventions.OPERATION: operation,
            conventions.PROVIDER: conventions.PROVIDER_NAME,
            conventions.REQUEST_MODEL: model,
            conventions.REQUEST_TIER: ask.service_tier,
            conventions.REQUEST_KEY: subjects.request_key(ask.tenant, ask.request_id),
        }
        if max_tokens != WHATEVER_FITS:
            attributes[conventions.REQUEST_MAX_TOKENS] = max_tokens
        parent = traceparent if telemetry.TraceParent.parse(traceparent) else None
        name = f"{operation} {model}"
        return self._tracing.start(name, parent, attributes, at_unix_s=began_unix_s, kind="server")

    async def _submit(self, ask: Ask, traceparent: str) -> list[Handle]:
        """Submits all requests or none. Raises RefusedError, BusError."""
        headers = {telemetry.TRACEPARENT: traceparent} if traceparent else None
        asked = [
            self._client.submit(request, ask.tier, headers=headers, persistent=ask.persistent)
            for request in ask.requests
        ]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        handles = [outcome for outcome in outcomes if isinstance(outcome, Handle)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not errors:
            return handles
        # a request that was there before is not ours to end: the refusal may be a conflict of ids
        new = [
            handle
            for handle in handles
            if handle.received and not (handle.received.attached or ask.persistent)
        ]
        for handle in handles:
            if handle not in new:
                handle.close()
        self._cancel(new, "another choice of the same request was refused")
        # a request without an answer may have been stored: it runs on only where its client knows
        # its id, and may come back for it
        if (len(asked) > 1 or not ask.named) and not ask.persistent:
            doubtful = [
                r for r, outcome in zip(ask.requests, outcomes, strict=True) if _in_doubt(outcome)
            ]
            self._tasks.create_task(self._withdraw(doubtful), name="gateway.cancel")
        # a clear refusal is told rather than a doubt
        error = next((error for error in errors if isinstance(error, RefusedError)), errors[0])
        if isinstance(error, PeerError) and not isinstance(error, RefusedError | Unsendable):
            # admission's answer was malformed: not the client's fault
            raise BusError(error.message) from error
        raise error

    async def _withdraw(self, requests: Sequence[GenerateRequest]) -> None:
        """Cancel requests that may be stored, or may yet be."""
        for _ in range(WITHDRAWALS):
            for request in requests:
                with contextlib.suppress(BusError):
                    await self._client.withdraw(request)
            await asyncio.sleep(WITHDRAW_EACH_S)

    def _cancel(self, handles: Sequence[Handle], reason: str) -> None:
        for handle in handles:
            if handle.over:
                handle.close()
            else:
                self._tasks.create_task(_cancel(handle, reason), name="gateway.cancel")

    def _log_end(
        self,
        ask: Ask,
        answer: Answer | None,
        gone: bool,
        error_type: str,
        span: telemetry.Span,
        began_unix_s: float,
    ) -> None:
        """Writes the answer's one log line and ends its span."""
        reasons: list[str] = []
        relegated = None
        if answer is not None:
            usage = answer.usage
            verdicts = [answer.verdicts[index] for index in sorted(answer.verdicts)]
            reasons = [verdict.finish_reason.value for verdict in verdicts]
            relegated = any(verdict.relegated for verdict in verdicts) if verdicts else None
            said: dict[str, telemetry.AttributeValue] = {
                conventions.INPUT_TOKENS: usage.prompt_tokens,
                conventions.OUTPUT_TOKENS: usage.completion_tokens,
                conventions.RESPONSE_TIER: answer.service_tier,
                conventions.FINISH_REASONS: reasons,
            }
            span.set(**said)
        if error_type:
            span.set(**{conventions.ERROR_TYPE: error_type})
        span.end()
        with logs.traced(span.traceparent):
            log.info(
                "request.served",
                operation=ask.api_format.operation,
                request_id=ask.request_id,
                correlation_id=ask.correlation_id or None,
                tenant=ask.tenant,
                tier=ask.tier,
                choices=len(ask.requests),
                status=0 if answer is None else answer.status,
                finish_reasons=reasons,
                relegated=relegated,
                hung_up=gone,
                error=error_type or None,
                duration_s=round(self._clock.unix_s() - began_unix_s, 6),
            )


def _in_doubt(outcome: object) -> bool:
    """True if the request may be stored, or may yet be."""
    if isinstance(outcome, RefusedError):
        return outcome.refused.code == "server_is_overloaded"
    return isinstance(outcome, BusError)


async def _cancel(handle: Handle, reason: str) -> None:
    """Cancels, and listens until the end: the handle repeats the cancel as long as it listens."""
    try:
        with contextlib.suppress(TimeoutError, SlacklineError):
            async with asyncio.timeout(CANCEL_WITHIN_S):
                await handle.cancel(reason)
                async for _ in handle:
                    pass
    finally:
        handle.close()
