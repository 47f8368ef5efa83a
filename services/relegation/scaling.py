"""Tells how many replicas each model needs: once a second, by the instance that leads. Those that
stand by hear the same, so that whoever leads next knows the load.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from shared import subjects
from shared.bus.api import Bus, Call
from shared.clock import Clock
from shared.core.scaling.scaling import ScalingCore
from shared.errors import BusError
from shared.process.chores import Chores
from shared.schemas import Announce, Digest, Ended, ReplicasNeeded, WorkArrived
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry

EVERY_S = 1.0  # as the simulated law looks (loadgen/simulator/elastic/law.py)
MODELS_LIMIT = 64
TIERS_LIMIT = 64


class Scaling:
    """The forecasts, one core for each model that is heard of."""

    def __init__(
        self, bus: Bus, clock: Clock, warm_up_s: float, metrics: Registry, leads: Callable[[], bool]
    ) -> None:
        self._bus, self._clock, self._warm_up_s, self._leads = bus, clock, warm_up_s, leads
        self._cores: dict[str, ScalingCore] = {}
        self._gauge = metrics.gauge(
            names.REPLICAS_NEEDED,
            "Replicas that this tier asks for, beside all tiers that are due sooner.",
            ("model_name", "tier"),
            {"model_name": MODELS_LIMIT, "tier": TIERS_LIMIT},
        )

    async def listen(self, chores: Chores) -> None:
        bus = self._bus
        chores.listen(await bus.subscribe(subjects.ANNOUNCEMENTS, Announce, self._on_announce))
        chores.listen(await bus.subscribe(subjects.ARRIVED, WorkArrived, self._on_arrived))
        chores.listen(await bus.subscribe(subjects.ENDED, Ended, self._on_ended))

    async def run(self) -> None:
        """Tell what is needed, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            if not self._leads():
                self._show([])
                continue
            now = self._clock.unix_s()
            needed = [core.needed(model, now) for model, core in self._cores.items()]
            self._show(needed)
            for each in needed:
                with suppress(BusError):  # another follows
                    await self._bus.publish(subjects.SCALING, each)

    def heard(self, digest: Digest) -> None:
        core = self._core(digest.model)
        if core is not None:
            core.heard(digest, self._clock.unix_s())

    def _show(self, needed: list[ReplicasNeeded]) -> None:
        """Export these needs; a tier that is not among them asks for nothing."""
        for gauge in self._gauge.children.values():
            gauge.set(0)
        for each in needed:
            for need in each.tiers:
                self._gauge.labels(each.model, need.tier).set(need.replicas)

    def _core(self, model: str) -> ScalingCore | None:
        """The core of a model. Work whose model was not known yet is that of the only model."""
        if not model:
            return next(iter(self._cores.values())) if len(self._cores) == 1 else None
        core = self._cores.get(model)
        if core is None and len(self._cores) < MODELS_LIMIT:
            core = self._cores[model] = ScalingCore(self._warm_up_s, self._clock.unix_s())
        return core

    def _on_announce(self, announce: Announce, call: Call) -> None:
        if call.subject == subjects.announce(announce.replica):
            core = self._core(announce.model)
            if core is not None:
                core.announced(announce)

    def _on_arrived(self, work: WorkArrived, call: Call) -> None:
        core = self._core(work.model)
        if core is not None:
            core.arrived(work, self._clock.unix_s())

    def _on_ended(self, ended: Ended, call: Call) -> None:
        for model, core in self._cores.items():
            if ended.model in ("", model):
                core.ended(ended, self._clock.unix_s())
