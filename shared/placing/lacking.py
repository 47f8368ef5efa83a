"""Asks planners for the prefixes that their digests alone did not tell, for admission and
relegation.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from shared import subjects
from shared.bus.api import Bus
from shared.errors import BusError, PeerError
from shared.schemas import AskPrefixes, Prefixes
from shared.vocabulary import ReplicaId

EVERY_S = 1.0  # between two looks whether some replica's prefixes are lacking


async def ask_for_lacking(
    bus: Bus,
    lacking: Callable[[], Sequence[ReplicaId]],
    told: Callable[[ReplicaId, Prefixes], object],
) -> None:
    """Ask, each second, the planners of the replicas that are `lacking`."""
    while True:
        await asyncio.sleep(EVERY_S)
        for replica in lacking():
            with suppress(BusError, PeerError):  # asked again
                prefixes = await bus.request(
                    subjects.prefixes(replica), AskPrefixes(), Prefixes, timeout_s=EVERY_S
                )
                told(replica, prefixes)
