"""nats-py's client, with two repairs."""

import asyncio
from typing import Any

from nats.aio.client import PING_PROTO, Client


class OrderedClient(Client):
    """A client whose PING waits behind the commands before it, and whose read loop survives the
    PONG of a cancelled flush().

    nats-py 2.16 writes a PING to the socket at once. So its flush() and drain() may be confirmed
    before the subscription, message or unsubscription that they follow has been sent: a subscriber
    is not there yet, and a drained one loses the messages in between. And the PONG of a flush()
    that was cancelled ends its read loop: the connection receives nothing until it is found to be
    stale.
    """

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        self._pongs.append(asyncio.get_running_loop().create_future() if future is None else future)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()
