"""Reads the workers' heartbeats: contexts, profiles and engine times of a running fleet."""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress

from loadgen.load.mix import PlannedRequest
from loadgen.load.tally import Resolve
from shared import subjects
from shared.bus.api import Bus, Call
from shared.core.announced import profile_of
from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.zero_load import in_seconds
from shared.schemas import Announce, EngineTime
from shared.vocabulary import ReplicaId

HEARTBEAT_S = 3.0  # a living worker is heard within it
EACH_S = 0.6  # after the first worker was heard, every living one is within this time


class Heartbeats:
    """The heartbeats of the workers, since the first of each was heard."""

    def __init__(self, model: str | None = None) -> None:
        """`model`: the one that the load names."""
        self._model = model
        self._newest: dict[ReplicaId, Announce] = {}
        # by incarnation, since each counts from its own beginning
        self._first: dict[str, EngineTime] = {}
        self._last: dict[str, EngineTime] = {}
        self._heard = asyncio.Event()
        self._awaited: set[ReplicaId] = set()
        self._heard_at_s = math.inf

    async def listen(self, bus: Bus) -> None:
        self._heard_at_s = asyncio.get_running_loop().time()
        await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, self._on_announce)

    def _on_announce(self, announce: Announce, _: Call) -> None:
        self._newest[announce.replica] = announce
        self._heard_at_s = asyncio.get_running_loop().time()
        self._first.setdefault(announce.incarnation, announce.time)
        self._last[announce.incarnation] = announce.time
        self._awaited.discard(announce.replica)
        if not self._awaited:
            self._heard.set()

    @property
    def silent_s(self) -> float:
        """Seconds since a worker was heard."""
        return asyncio.get_running_loop().time() - self._heard_at_s

    async def workers(self) -> Mapping[ReplicaId, Announce]:
        """The newest heartbeat of every living worker. Raises ConfigError if none is heard."""
        try:
            async with asyncio.timeout(HEARTBEAT_S):
                await self._heard.wait()
                await asyncio.sleep(EACH_S)
        except TimeoutError as error:
            raise ConfigError("no worker is heard: is the fleet up?") from error
        return self._newest

    async def context_tokens(self) -> int:
        """The context that every worker has. Raises ConfigError if no worker is heard."""
        try:
            workers = await self.workers()
        except ConfigError as error:
            raise ConfigError(f"{error} --context N says what requests may have") from error
        return min(worker.context_tokens for worker in self._meant(workers))

    async def spent(self) -> EngineTime:
        """The time of all engines together, up to one more heartbeat of each."""
        self._awaited = set(self._newest)
        self._heard.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._heard.wait()
        spans = [(self._first[incarnation], last) for incarnation, last in self._last.items()]
        return EngineTime(
            exec_s=sum(last.exec_s - first.exec_s for first, last in spans),
            idle_s=sum(last.idle_s - first.idle_s for first, last in spans),
            late_s=sum(last.late_s - first.late_s for first, last in spans),
            predicted_s=sum(last.predicted_s - first.predicted_s for first, last in spans),
        )

    async def profile(self) -> Profile:
        """The profile by which admission turns multiples of zero-load time into seconds: that of
        the worker with the longest context. Raises ConfigError if no worker is heard.
        """
        workers = await self.workers()
        return profile_of(max(self._meant(workers), key=lambda worker: worker.context_tokens))

    def _meant(self, workers: Mapping[ReplicaId, Announce]) -> list[Announce]:
        """The workers of the model; all where it is none of theirs, as by an alias."""
        every = list(workers.values())
        return [worker for worker in every if worker.model == self._model] or every


def resolved_by(profile: Profile, max_tokens: Callable[[PlannedRequest], int]) -> Resolve:
    """A function that turns the bounds of a planned request into seconds, as admission does."""
    return lambda slo, planned: in_seconds(slo, profile, planned.prompt_tokens, max_tokens(planned))
