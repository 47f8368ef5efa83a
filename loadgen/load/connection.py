"""A client of a running fleet, with errors that say what to do."""

import logging
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from shared.bus.nats import connect
from shared.client.client import Client, Patience
from shared.clock import Clock
from shared.errors import BusError, ConfigError

CONNECT_S = 3.0  # a person is waiting
# For a client that offers a load: most requests of a burst wait their turn in silence, and asking
# after them often would be a load of another kind.
LOAD_PATIENCE = Patience(silence_s=15.0)


def quiet_logs() -> None:
    """Standard output is for answers and tables; of the bus, only warnings and errors are of
    interest.
    """
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


@asynccontextmanager
async def connected(url: str, name: str, clock: Clock, patience: Patience) -> AsyncIterator[Client]:
    """Raises BusError if nothing usable listens at `url`."""
    quiet_logs()
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(connect(url, name, connect_s=CONNECT_S))
        except ConfigError as error:
            raise BusError(
                f"{error}: start a fleet with `slackline up`, or say where one is with --url or "
                f"SLACKLINE_URL"
            ) from error
        yield await stack.enter_async_context(Client(bus, clock, patience=patience))
