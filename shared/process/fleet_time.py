"""Keeps all processes of a fleet at one time, whatever the clocks of their hosts say.

Records, offers and acks carry instants that others compare with their clock. So each process moves
its clock (shared/clock.py) to that of the NATS server that leads the leases: at its start, then by
slewing every SYNC_S. It asks as NTP does; half the fastest round trip bounds the error.

If the server's clock jumps, the fleet keeps its time: a process that finds it more than AGREE_S
away asks the others. A process that begins takes their time. A process that was paused finds that
they agree with the server, and jumps. A host's wall clock that is off is exported; beyond WARN_S it
is logged, beyond UNREADY_S the gateways' /ready names the service (services/gateway/clocks.py).
"""

import asyncio
from contextlib import suppress
from statistics import median

import structlog

from shared import subjects
from shared.bus.api import Bus, Call
from shared.clock import Clock
from shared.errors import BusError, NoResponders, PeerError
from shared.process.chores import Chores
from shared.schemas import TimeAsked, TimeTold
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry

log = structlog.get_logger()

SYNC_S = 10.0  # a clock that drifts by 50 ppm is off by 0.5 ms then
SAMPLES = 5  # round trips to the server; the fastest counts
PEERS = 3  # processes that are asked; the median of their times counts
ASKS = 8  # questions at most: more than PEERS, since one's own answers do not count
ASK_S = 0.5
AGREE_S = 1.0  # further apart, the server's clock has jumped, or ours has lost time
WARN_S = 1.0
UNREADY_S = 10.0
WARN_EVERY_S = 60.0
UNHEARD = 3  # after so many rounds without another's answer there is no other process
TELLS = ("admission", "planner")  # the services that answer, since each fleet has both


class FleetTime:
    """Keeps a process at the fleet's time. Call `begin` before the clock is used, then `keep`."""

    def __init__(
        self, bus: Bus, clock: Clock, service: str, instance: str, metrics: Registry | None = None
    ) -> None:
        """`service`: the process's service; empty for a guest, which only reads the time."""
        self._bus, self._clock, self._service, self._instance = bus, clock, service, instance
        self._warned_unix_s, self._unheard = float("-inf"), 0
        self._apart = False  # the fleet and the server disagree, and that was logged
        text = "The wall clock of this process's host minus the time of its fleet."
        if metrics is not None:
            gauge = metrics.gauge(names.HOST_CLOCK_AHEAD, text).labels()
            metrics.before_scrape(lambda: gauge.set(clock.host_ahead_s()))

    async def begin(self) -> None:
        """Move the clock to the fleet's time. Without any answer it stays that of the host."""
        server_s = await self._server_ahead_s()
        others_s = await self._others_ahead_s()
        if others_s and (server_s is None or abs(median(others_s) - server_s) > AGREE_S):
            self._clock.move(median(others_s))
        elif server_s is not None:
            self._clock.move(server_s)
        self._compare()

    async def keep(self) -> None:
        """Follow the fleet's time, and tell it to processes that ask, until cancelled."""
        async with Chores() as chores:

            def answer(_: TimeAsked, call: Call) -> None:
                chores.spawn(call.reply(self._told()), "time.answer")

            telling = self._service not in TELLS
            while True:
                with suppress(BusError):  # the next round tries again
                    await self._bus.publish(subjects.TIMES, self._told())
                    if not telling:
                        chores.listen(
                            await self._bus.subscribe(
                                subjects.TIME, TimeAsked, answer, queue="time"
                            )
                        )
                        telling = True
                await asyncio.sleep(SYNC_S)
                await self._follow()
                self._compare()

    async def _follow(self) -> None:
        ahead_s = await self._server_ahead_s()
        if ahead_s is None:
            return
        if abs(ahead_s) <= AGREE_S:
            self._unheard, self._apart = 0, False
            self._clock.slew(ahead_s, SYNC_S)
            return
        others_s = await self._others_ahead_s()
        if others_s:
            self._unheard = 0
            ours_s = median(others_s)
            if not self._apart:
                log.warning("time.server_jumped", by_s=ahead_s, others_ahead_s=ours_s)
            self._apart = True
            if abs(ours_s) <= AGREE_S:
                self._clock.slew(ours_s, SYNC_S)
            else:
                self._clock.move(ours_s)
            return
        self._unheard += 1
        if others_s is None or self._unheard >= UNHEARD:
            self._unheard = 0
            log.warning("time.moved", by_s=ahead_s)
            self._clock.move(ahead_s)

    async def _server_ahead_s(self) -> float | None:
        """The server's clock minus ours; None where it does not answer."""
        fastest: tuple[float, float] | None = None
        try:
            for _ in range(SAMPLES):
                before = self._clock.unix_s()
                server = await self._bus.server_unix_s()
                after = self._clock.unix_s()
                sample = (after - before, server - (before + after) / 2)
                fastest = sample if fastest is None else min(fastest, sample)
        except BusError as error:
            log.warning("time.unknown", error=str(error))
        return fastest[1] if fastest else None

    async def _others_ahead_s(self) -> list[float] | None:
        """Other processes' clocks minus ours, PEERS at most; None if nobody can answer."""
        found = dict[str, float]()
        for _ in range(ASKS):
            before = self._clock.unix_s()
            try:
                told = await self._bus.request(
                    subjects.TIME, TimeAsked(), TimeTold, timeout_s=ASK_S
                )
            except NoResponders:
                return None
            except (BusError, PeerError):
                continue
            if told.instance != self._instance:
                found[told.instance] = told.unix_s - (before + self._clock.unix_s()) / 2
            if len(found) == PEERS:
                break
        return list(found.values())

    def _told(self) -> TimeTold:
        return TimeTold(
            service=self._service,
            instance=self._instance,
            unix_s=self._clock.unix_s(),
            host_ahead_s=self._clock.host_ahead_s(),
        )

    def _compare(self) -> None:
        """Log that the host's clock is off, at most every WARN_EVERY_S."""
        ahead_s, now = self._clock.host_ahead_s(), self._clock.unix_s()
        if abs(ahead_s) > WARN_S and abs(now - self._warned_unix_s) >= WARN_EVERY_S:
            self._warned_unix_s = now
            log.warning(
                "clock.off",
                host_ahead_s=ahead_s,
                limit_s=WARN_S,
                hint="this host's wall clock and the fleet's differ: run NTP on every host",
            )
