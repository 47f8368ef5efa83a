"""Asks whether a service answers, in the protocol of the NATS services API."""

from msgspec import Struct

from shared.bus.api import Bus
from shared.errors import BusError, PeerError


class Pinged(Struct, frozen=True):
    """Any answer of the services API."""


async def answers(bus: Bus, service: str, within_s: float) -> bool:
    """Tells whether some instance of the service answers."""
    try:
        await bus.request(f"$SRV.PING.{service}", Pinged(), Pinged, timeout_s=within_s)
    except PeerError:
        # the services API answers in JSON without a type: any answer will do
        return True
    except BusError:
        return False
    return True
