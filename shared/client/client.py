"""The client that submits requests over the bus. It has one wildcard inbox and one callback for all
events; a task exists only for a question under way. Its readers get tokens in order, each once: it
asks the log (`slo.v1.attach`) for missing ones.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, Self
from uuid import uuid4

from msgspec.structs import replace

from shared import subjects
from shared.bus.api import Bus, Call, RefusedError, Subscription
from shared.client.assemble import Assembler
from shared.errors import BusError, BusTimeout, NoResponders, PeerError, SlacklineError
from shared.schemas import (
    Attach,
    Cancel,
    End,
    GenerateRequest,
    Received,
    Replay,
    Status,
    StreamEvent,
    Verdict,
)
from shared.vocabulary import RequestKey

TICK_S = 0.25  # between two looks for silent streams
REPEAT_CANCEL_S = 1.0
# pause after an answer that did not fill the gap; it doubles
FRUITLESS_S, FRUITLESS_LIMIT_S = 0.05, 2.0
REFUSED_S = 1.0  # until an attach that was refused is repeated
# unread events of a slow reader, half a minute at 30 tokens/s; more are dropped, then replayed
QUEUE_EVENTS = 1024
# attaches in flight per client, so that a thousand silent streams do not send a thousand at once
ASKING_AT_ONCE = 32
COPIES_FOR_S = 10  # after a refusal, copies of the request may still be read somewhere
# refusals that depend on one admission's state: another may have let a copy in
MAY_DIFFER = ("slow_down", "rate_limit_exceeded", "unattainable_slo", "server_is_overloaded")
REFUSALS_TO_BELIEVE = 3  # attaches refused in a row before a stream is given up

Sink = Callable[[StreamEvent], None]


def _drop(event: StreamEvent) -> None:
    """The sink of whoever reads no event."""


class Now(Protocol):
    """shared.clock.Clock, or virtual time."""

    def unix_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Bounds on every wait, in seconds."""

    answer_s: float = 2.0  # one request to admission
    submit_s: float = 15.0  # repeats of a submission under the same id, over a restart of admission
    # silence after which the client asks whether it missed an event; doubles up to silence_limit_s
    silence_s: float = 5.0
    silence_limit_s: float = 60.0
    # until a client gives up if nobody answers, or if a known gap stays open
    give_up_s: float = 60.0


def new_request_id() -> str:
    return uuid4().hex


class Handle:
    """A request under way. Iterate over its events once, to End; a failure is raised."""

    def __init__(
        self, client: "Client", request: GenerateRequest, tier: str, sink: Sink | None
    ) -> None:
        self.key = subjects.request_key(request.tenant, request.request_id)
        self.request = request
        self.tier = tier
        self.received: Received | None = None
        self.status: Status | None = None  # the latest
        self.verdict: Verdict | None = None
        # set when there may be something to take; a reader of several handles gives them one Event
        self.wake = asyncio.Event()
        self._client = client
        self._sink = sink
        self._unread: deque[StreamEvent] = deque()
        self._over: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        # mark its exception as read, even if nobody waits
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())
        # The client's notes about this request.
        self.assembler = Assembler()
        self.routes: list[str] = []
        self.subscription: Subscription | None = None
        self.cancelling = ""
        self.overflowed = False  # events were dropped because the reader is slow
        self.asking = False
        self.alive_unix_s = 0.0  # submission, last progress, or last answer that showed no gap
        self.ask_unix_s = 0.0  # when to ask if no event comes
        self.silence_s = 0.0
        self.fruitless_s = FRUITLESS_S
        self.refusals = 0

    @property
    def over(self) -> bool:
        return self._over.done()

    @property
    def unread(self) -> int:
        return len(self._unread)

    @property
    def full(self) -> bool:
        return len(self._unread) >= QUEUE_EVENTS

    def show(self, events: list[StreamEvent]) -> None:
        for event in events:
            if isinstance(event, Status):
                self.status = event
            elif isinstance(event, End):
                self.verdict = event.verdict
            if self._sink is not None:
                self._sink(event)
            else:
                self._unread.append(event)
        if self.verdict is not None and not self.over:
            self._over.set_result(self.verdict)
        self.wake.set()

    def fail(self, error: SlacklineError) -> None:
        if not self.over:
            self._over.set_exception(error)
        self.wake.set()

    async def wait(self) -> Verdict:
        """The verdict, once the request has ended. Events that nobody has read are dropped: unread,
        they would fill the queue, and the end would never come. Raises the failure (a
        SlacklineError).
        """
        if self._sink is None:
            self._sink = _drop
            self._unread.clear()
        return await asyncio.shield(self._over)

    def take(self) -> StreamEvent | None:
        """The next event, if it is here. Raises the failure after the last event before it."""
        if self._unread:
            return self._unread.popleft()
        if self.over:
            self._over.result()
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamEvent:
        """The next event. Silence leads to questions, and after the patience to BusTimeout."""
        while (event := self.take()) is None:
            if self.over:
                raise StopAsyncIteration
            self.wake.clear()
            await self.wake.wait()
        return event

    async def cancel(self, reason: str = "cancelled by the client") -> None:
        """Ask for the end of the request, again and again until End comes: a cancel may be lost."""
        self.cancelling = reason
        if self.verdict is None:
            await self._client.bus.publish(subjects.cancel(self.key), Cancel(reason=reason))

    def close(self) -> None:
        """Stop listening. The request itself goes on."""
        self.fail(BusTimeout(f"request {self.key}: its handle was closed before the end"))
        self._client.forget(self)


class Client:
    """A client: `async with Client(bus, clock) as client`. After the block requests go on."""

    def __init__(
        self,
        bus: Bus,
        clock: Now,
        *,
        patience: Patience | None = None,
        client_id: str | None = None,
    ) -> None:
        self.bus = bus
        self._clock = clock
        self._patience = patience if patience is not None else Patience()
        self._id = client_id if client_id is not None else uuid4().hex
        # the tenant of a request that names none
        self._tenant = bus.tenants if bus.tenants != subjects.EVERY else subjects.DEFAULT_TENANT
        self._numbers = itertools.count(1)
        self._routes: dict[str, list[Handle]] = {}  # subject of events -> handles that listen
        # a dict, for its order: a set would be walked in the order of addresses
        self._handles: dict[Handle, None] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._withdrawing: dict[RequestKey, asyncio.Task[None]] = {}
        self._asking = asyncio.Semaphore(ASKING_AT_ONCE)
        self._inbox: Subscription | None = None

    async def __aenter__(self) -> Self:
        self._inbox = await self.bus.subscribe(
            f"{self._root(self.bus.tenants)}.*", StreamEvent, self._hear
        )
        self._start(self._watch(), "client.watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        listening = [handle.subscription for handle in self._handles] + [self._inbox]
        for handle in list(self._handles):
            handle.subscription = None
            handle.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subscription in listening:
            if subscription is not None:
                await subscription.stop()

    async def submit(
        self,
        request: GenerateRequest,
        tier: str,
        *,
        persistent: bool = False,
        sink: Sink | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Handle:
        """Send a request; returns once it is stored. The request is repeated under its id while the
        outcome is unknown.

        A known id attaches, from the first token. `persistent`: some process submits the request
        until it has an answer, so nothing stored is cancelled. `sink` gets events as they come (it
        must be quick and raise nothing); then `handle.wait()` returns at the end. Raises PeerError
        (refused), NoResponders or BusTimeout (no answer for `submit_s`; it may be stored).
        """
        request = self._of_tenant(request)
        key = subjects.request_key(request.tenant, request.request_id)
        own = f"{self._root(request.tenant)}.{next(self._numbers)}"
        handle = Handle(self, replace(request, inbox=own), tier, sink)
        handle.alive_unix_s, handle.silence_s = self._clock.unix_s(), self._patience.silence_s
        self._handles[handle] = None
        if (withdrawing := self._withdrawing.pop(key, None)) is not None:
            withdrawing.cancel()  # the copies of this request are wanted again
        self._route(own, handle)
        try:
            handle.received = await self._store(handle, headers, known=persistent)
            if handle.over:  # the request's events came before the answer
                return handle
            stream = handle.received.stream_subject
            if stream != own:
                await self._follow(handle, stream)
        except BaseException as error:
            handle.close()
            if isinstance(error, asyncio.CancelledError) and not persistent:
                with suppress(BusError):
                    await handle.cancel()  # the request may have been stored
            raise
        now_unix_s = self._clock.unix_s()
        handle.alive_unix_s = now_unix_s
        handle.ask_unix_s = now_unix_s if stream != own else now_unix_s + handle.silence_s
        self._ask_if_due(handle, now_unix_s)
        return handle

    async def withdraw(self, request: GenerateRequest) -> None:
        """Cancel a request that may have been stored. The cancel is sent once. Raises BusError."""
        request = self._of_tenant(request)
        key = subjects.request_key(request.tenant, request.request_id)
        await self.bus.publish(subjects.cancel(key), Cancel(reason="its submission was given up"))

    async def _withdraw_copies(self, handle: Handle) -> None:
        """Cancel the copies of a request that were sent before one was refused: an admission that
        was paused may find them late. This ends if the same id is submitted again.
        """
        for _ in range(COPIES_FOR_S):
            with suppress(BusError):
                await self.withdraw(handle.request)
            await asyncio.sleep(1.0)
        self._withdrawing.pop(handle.key, None)

    def _of_tenant(self, request: GenerateRequest) -> GenerateRequest:
        return request if request.tenant else replace(request, tenant=self._tenant)

    def _root(self, tenant: str) -> str:
        """The inboxes of this client for the requests of a tenant."""
        return f"{subjects.inbox(tenant)}.{self._id}"

    def forget(self, handle: Handle) -> None:
        self._handles.pop(handle, None)
        for subject in handle.routes:
            listeners = self._routes[subject]
            listeners.remove(handle)
            if not listeners:
                del self._routes[subject]
        handle.routes.clear()
        subscription, handle.subscription = handle.subscription, None
        if subscription is not None:
            self._start(subscription.stop(), "client.unsubscribe")

    def _route(self, subject: str, handle: Handle) -> None:
        self._routes.setdefault(subject, []).append(handle)
        handle.routes.append(subject)

    async def _follow(self, handle: Handle, stream: str) -> None:
        """Listen on the subject of a request that was submitted earlier under the same id."""
        known = stream in self._routes or stream.startswith(f"{self._root(handle.request.tenant)}.")
        self._route(stream, handle)
        if not known:
            if handle.subscription is not None:
                await handle.subscription.stop()
            handle.subscription = await self.bus.subscribe(stream, StreamEvent, self._hear)

    async def _store(
        self, handle: Handle, headers: Mapping[str, str] | None, *, known: bool
    ) -> Received:
        """Store the request. `known`: others know the id, and may come back for it."""
        give_up_unix_s = self._clock.unix_s() + self._patience.submit_s
        pause_s, repeats = 0.1, 0
        while True:
            try:
                return await self.bus.request(
                    subjects.requests(handle.request.tenant, handle.tier),
                    handle.request,
                    Received,
                    timeout_s=self._patience.answer_s,
                    headers=headers,
                )
            except RefusedError as error:
                # where the store did not answer, nobody knows whether the request is stored
                in_doubt = error.code == "server_is_overloaded" and error.refused.retry_after_s
                if not in_doubt or self._clock.unix_s() + pause_s >= give_up_unix_s:
                    may_run = repeats and error.refused.code in MAY_DIFFER and not known
                    if may_run and handle.key not in self._withdrawing:
                        self._withdrawing[handle.key] = self._start(
                            self._withdraw_copies(handle), "client.withdraw"
                        )
                    raise
            except (NoResponders, BusTimeout):
                if self._clock.unix_s() + pause_s >= give_up_unix_s:
                    raise
            repeats += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)

    def _hear(self, event: StreamEvent, call: Call) -> None:
        for handle in tuple(self._routes.get(call.subject, ())):
            if handle.full:
                handle.overflowed = True
            else:
                self._digest(handle, handle.assembler.take(event))

    def _digest(self, handle: Handle, events: list[StreamEvent]) -> None:
        """Hand out new events, note the sign of life, and ask for output that is missing."""
        now_unix_s = self._clock.unix_s()
        if events or not handle.assembler.missing:
            handle.alive_unix_s = now_unix_s
        if events:
            handle.silence_s, handle.fruitless_s = self._patience.silence_s, FRUITLESS_S
            handle.ask_unix_s = now_unix_s + handle.silence_s
            handle.show(events)
        if handle.over:
            self.forget(handle)
        else:
            self._ask_if_due(handle, now_unix_s)

    def _ask_if_due(self, handle: Handle, now_unix_s: float) -> None:
        due = handle.assembler.missing or handle.overflowed or now_unix_s >= handle.ask_unix_s
        if due and not (handle.asking or handle.over or handle.received is None or handle.full):
            handle.asking = True
            self._start(self._ask(handle), "client.attach")

    async def _ask(self, handle: Handle) -> None:
        """Ask the log once; pause if the answer brought nothing that was missing."""
        request = handle.request
        async with self._asking:
            handle.overflowed = False
            question = Attach(
                tenant=request.tenant,
                request_id=request.request_id,
                from_token=handle.assembler.ask(),
            )
            try:
                replay = await self.bus.request(
                    subjects.attach(request.tenant),
                    question,
                    Replay,
                    timeout_s=self._patience.answer_s,
                )
                handle.refusals = 0
                self._digest(handle, handle.assembler.fill(replay))
            except PeerError as error:
                # without the store an admission knows nothing: that is no answer
                knows = error.code != "server_is_overloaded"
                handle.refusals += knows
                if knows and handle.refusals >= REFUSALS_TO_BELIEVE:
                    handle.fail(error)
                    self.forget(handle)
            except BusError:
                pass  # nobody answers now: asked again below, and given up by the watch
        if handle.assembler.missing:
            await asyncio.sleep(handle.fruitless_s)
            handle.fruitless_s = min(2 * handle.fruitless_s, FRUITLESS_LIMIT_S)
        now_unix_s = self._clock.unix_s()
        handle.silence_s = min(2 * handle.silence_s, self._patience.silence_limit_s)
        handle.ask_unix_s = now_unix_s + (REFUSED_S if handle.refusals else handle.silence_s)
        handle.asking = False
        self._ask_if_due(handle, now_unix_s)

    async def _watch(self) -> None:
        """Look for silent streams, repeat cancels, and give up requests that nobody answers for."""
        repeat_unix_s = 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now_unix_s = self._clock.unix_s()
            for handle in [handle for handle in self._handles if handle.received is not None]:
                silent_s = now_unix_s - handle.alive_unix_s
                if handle.full:
                    handle.alive_unix_s = now_unix_s  # the reader is slow
                elif silent_s > self._patience.give_up_s + handle.silence_s:
                    handle.fail(
                        BusTimeout(f"request {handle.key}: no event came for {silent_s:.0f} s")
                    )
                    self.forget(handle)
                else:
                    self._ask_if_due(handle, now_unix_s)
            if now_unix_s >= repeat_unix_s:
                repeat_unix_s = now_unix_s + REPEAT_CANCEL_S
                for handle in [handle for handle in self._handles if handle.cancelling]:
                    with suppress(BusError):
                        await handle.cancel(handle.cancelling)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours: nobody may wait any longer for the work of that task.
            for handle in list(self._handles):
                handle.fail(SlacklineError(f"{task.get_name()} failed: {error!r}"))
