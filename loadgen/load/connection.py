"""Connects commands to a running fleet, with errors that say what to do."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import structlog

from loadgen.access import Access, running
from shared.bus.nats import NatsBus, connect
from shared.bus.users import User
from shared.client.client import Client, Patience
from shared.clock import Clock
from shared.errors import BusError, ConfigError

CONNECT_S = 3.0  # a person is waiting
# For a client that offers a load: most requests of a burst wait their turn in silence, and asking
# after them often would be a load of another kind.
LOAD_PATIENCE = Patience(silence_s=15.0)


def quiet_logs() -> None:
    """Log warnings only: standard output is for answers and tables."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def bus_at(
    access: Access, name: str, user: User, connect_s: float = CONNECT_S
) -> AbstractAsyncContextManager[NatsBus]:
    """A bus at this server, as this user. Raises ConfigError."""
    return connect(
        access.url, name, user, creds=access.creds, tls_ca=access.tls_ca, connect_s=connect_s
    )


@asynccontextmanager
async def connecting(access: Access, name: str, user: User) -> AsyncIterator[NatsBus]:
    """Raises BusError if nothing usable listens there, or it does not let the user in."""
    quiet_logs()
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(bus_at(access, name, user))
        except ConfigError as error:
            others = " or ".join(f"--url {url}" for url in running() if url != access.url)
            raise BusError(
                f"{error}: pass {others}, where your `slackline up` is"
                if others
                else f"{error}: start a fleet with `slackline up`, or say where one is with --url "
                "or SLACKLINE_URL, and who you are with --creds and --tls-ca"
            ) from error
        yield bus


@asynccontextmanager
async def connected(
    access: Access, name: str, user: User, clock: Clock, patience: Patience
) -> AsyncIterator[Client]:
    """Raises BusError as `connecting`."""
    async with (
        connecting(access, name, user) as bus,
        Client(bus, clock, patience=patience) as client,
    ):
        yield client
