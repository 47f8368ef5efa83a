"""The engines of a running fleet, as the heartbeats of their workers tell of them."""

import asyncio
from collections.abc import Callable

from loadgen.load.mix import PlannedRequest
from loadgen.load.tally import Resolve
from shared import subjects
from shared.bus.api import Bus, Call
from shared.core.announced import profile_of
from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.zero_load import in_seconds
from shared.schemas import Announce
from shared.vocabulary import ReplicaId

HEARTBEAT_S = 3.0  # a living worker is heard within it


class Heartbeats:
    """The newest heartbeat of each worker."""

    def __init__(self) -> None:
        self._newest: dict[ReplicaId, Announce] = {}
        self._heard = asyncio.Event()

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, self._on_announce)

    def _on_announce(self, announce: Announce, _: Call) -> None:
        self._newest[announce.replica] = announce
        self._heard.set()

    async def profile(self) -> Profile:
        """The profile by which admission turns multiples of zero-load time into seconds: that of
        the worker with the longest context. Raises ConfigError if no worker is heard.
        """
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._heard.wait()
        except TimeoutError as error:
            raise ConfigError(
                "bounds in multiples of zero-load time need a running worker, and none is heard"
            ) from error
        return profile_of(max(self._newest.values(), key=lambda worker: worker.context_tokens))


def resolved_by(profile: Profile, max_tokens: Callable[[PlannedRequest], int]) -> Resolve:
    """A function that turns the bounds of a planned request into seconds, as admission does."""
    return lambda slo, planned: in_seconds(slo, profile, planned.prompt_tokens, max_tokens(planned))
