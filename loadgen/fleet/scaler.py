"""Starts and drains the workers of a fleet by the replicas needed that relegation tells."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from loadgen.fleet.child import Say
from shared import subjects
from shared.bus.api import Bus
from shared.schemas import Digest, ReplicasNeeded
from shared.vocabulary import ReplicaId


class Fleet(Protocol):
    """The part of a fleet that is scaled."""

    running: set[ReplicaId]  # those whose worker starts, runs or leaves

    @property
    def replicas(self) -> list[ReplicaId]:
        """All that may run."""

    def start_worker(self, replica: ReplicaId) -> None: ...

    async def stop_worker(self, replica: ReplicaId) -> None: ...


Connect = Callable[[str], AbstractAsyncContextManager[Bus]]


class Scaler:
    def __init__(self, fleet: Fleet, fewest: int, connect: Connect, say: Say) -> None:
        """`fewest` replicas always run; `connect` connects to the fleet's NATS server."""
        self._fleet, self._fewest, self._connect, self._say = fleet, fewest, connect, say
        self._needed: ReplicasNeeded | None = None
        self._told = asyncio.Event()
        self._held: dict[ReplicaId, int] = {}  # requests, by the newest digest
        self._leaving: dict[ReplicaId, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow what is needed, until cancelled."""
        async with self._connect("slackline-fleet") as bus, asyncio.TaskGroup() as tasks:
            await bus.subscribe(subjects.SCALING, ReplicasNeeded, self._on_needed)
            await bus.subscribe(subjects.DIGESTS, Digest, self._on_digest)
            while True:
                await self._told.wait()
                self._told.clear()
                assert self._needed is not None
                self._follow(self._needed, tasks)

    def _on_needed(self, needed: ReplicasNeeded, _: object) -> None:
        self._needed = needed
        self._told.set()

    def _on_digest(self, digest: Digest, _: object) -> None:
        self._held[digest.replica] = digest.waiting + digest.running + digest.best_effort

    def _follow(self, needed: ReplicasNeeded, tasks: asyncio.TaskGroup) -> None:
        """Start the first replicas that do not run, or drain those with the fewest requests. One
        that leaves may be started again once it has ended.
        """
        running = self._fleet.running
        wanted = min(max(needed.replicas, self._fewest), len(self._fleet.replicas))
        staying = [replica for replica in self._fleet.replicas if replica in running]
        staying = [replica for replica in staying if replica not in self._leaving]
        free = [replica for replica in self._fleet.replicas if replica not in running]
        if len(staying) < wanted:
            for replica in free[: wanted - len(staying)]:
                self._say(f"{replica} is started: {needed.why}")
                self._fleet.start_worker(replica)
        elif len(staying) > wanted:
            newest = staying[::-1]
            newest.sort(key=lambda replica: self._held.get(replica, 0))
            for replica in newest[: len(staying) - wanted]:
                self._say(f"{replica} drains: {wanted} are needed")
                self._leaving[replica] = tasks.create_task(self._drain(replica), name="fleet.drain")

    async def _drain(self, replica: ReplicaId) -> None:
        try:
            await self._fleet.stop_worker(replica)
        finally:
            del self._leaving[replica]
            self._held.pop(replica, None)
