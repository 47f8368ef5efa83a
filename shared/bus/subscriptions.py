"""NATS subscriptions that begin and end together: a single one, or all of a nats.micro service."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RawSubscription
from nats.micro import add_service
from nats.micro.request import Handler
from nats.micro.service import EndpointStats

from shared.bus.api import Endpoint
from shared.bus.deadline import Deadline
from shared.bus.inbox import PENDING_BYTES, PENDING_MSGS
from shared.bus.permissions import may_answer

VERSION = "0.1.0"
# nats.micro wants a queue group for every endpoint; this name stands for none. A group, even of a
# single member, would share its messages with the member's earlier connection for as long as the
# server takes that for alive: a minute where packets were lost in silence.
NO_GROUP = "none"
STOP_S = 5.0


class Intake:
    """Subscriptions that end together. It stands in for nats.micro's client, too, so that micro's
    have our limits and are drained: micro's own stop throws away messages already received.
    """

    def __init__(
        self,
        client: Client,
        on_stop: Callable[["Intake"], None],
        on_refused: Callable[[str, Msg], None],
        deadline: Deadline,
    ) -> None:
        """`on_refused` is called with the subject subscribed to, and a message that comes from the
        store or asks for an answer elsewhere than at an inbox of its sender.
        """
        self._client = client
        self._nuid = client._nuid  # micro names its instances with it
        self._on_stop, self._on_refused, self._deadline = on_stop, on_refused, deadline
        self._subscriptions: list[RawSubscription] = []

    async def subscribe(
        self, subject: str, queue: str = "", cb: Callable[[Msg], Awaitable[None]] | None = None
    ) -> RawSubscription:
        async def received(msg: Msg) -> None:
            if _from_the_store(msg) or (msg.reply and not may_answer(msg.subject, msg.reply)):
                self._on_refused(subject, msg)
            elif cb is not None:
                await cb(msg)

        subscription = await self._client.subscribe(
            subject,
            queue="" if queue == NO_GROUP else queue,
            cb=received,
            pending_msgs_limit=PENDING_MSGS,
            pending_bytes_limit=PENDING_BYTES,
        )
        self._subscriptions.append(subscription)
        return subscription

    async def flush(self) -> None:
        await self._client.flush()

    async def stop(self) -> None:
        """End the subscriptions. Received messages go to the handler, for STOP_S at most."""
        subscriptions, self._subscriptions = self._subscriptions, []
        # A connection that is closed, or lost meanwhile, brings no new messages either.
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(self._deadline.within(STOP_S)):
                for subscription in subscriptions:
                    await subscription.drain()
        for subscription in subscriptions:
            if subscription._id in self._client._subs:
                # it was not drained: nats-py would subscribe it anew with the next connection, and
                # a queue group would lose a share of its messages to it
                self._client._remove_sub(subscription._id)
                subscription._stop_processing()
                with contextlib.suppress(nats.errors.Error):
                    await self._client._send_unsubscribe(subscription._id)
        self._on_stop(self)


def _from_the_store(msg: Msg) -> bool:
    """True for a stored message: JetStream sends these anywhere, past its asker's permissions."""
    return "Nats-Stream" in (msg.headers or {})


async def register(
    intake: Intake,
    name: str,
    endpoints: Iterable[tuple[Endpoint, Handler]],
    metadata: Mapping[str, str],
    amend: Callable[[EndpointStats], Any],
) -> None:
    """Register a service. `amend` is called on an endpoint's statistics before they go out."""
    service = await add_service(
        cast("Client", intake),
        name=name,
        version=VERSION,
        metadata=dict(metadata),
        stats_handler=amend,
    )
    for endpoint, handler in endpoints:
        await service.add_endpoint(
            name=endpoint.name,
            subject=endpoint.subject,
            handler=handler,
            queue_group=endpoint.queue or NO_GROUP,
            metadata={},
        )
