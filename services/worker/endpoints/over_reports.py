"""Reports ends of attempts to admission, from when the log has their acks until it answers."""

import asyncio

from services.worker.core.worker import WorkerCore
from shared import subjects
from shared.bus.api import Bus, Call
from shared.errors import BusError, PeerError
from shared.process.chores import Chores
from shared.schemas import AttemptOver, Settled, Withdraw, Withdrawn
from shared.vocabulary import RequestKey


class OverReports:
    def __init__(self, core: WorkerCore, bus: Bus, chores: Chores, *, retry_s: float) -> None:
        self._core = core
        self._bus = bus
        self._chores = chores
        self._retry_s = retry_s
        self._stored: set[tuple[RequestKey, int]] = set()  # attempts whose end is in the log
        self._asking: set[tuple[RequestKey, int]] = set()  # reports under way
        self._withdrawals: dict[tuple[RequestKey, int], list[Call]] = {}

    async def run(self) -> None:
        """Report again, until cancelled."""
        while True:
            await asyncio.sleep(self._retry_s)
            for over in self._core.unsettled:
                if (over.key, over.attempt) in self._stored:
                    self._report(over)

    def stored(self, over: AttemptOver) -> None:
        """The end is in the log: answer the withdrawals that waited for it, and report it."""
        name = (over.key, over.attempt)
        self._stored.add(name)
        for call in self._withdrawals.pop(name, []):
            self._chores.spawn(call.reply(Withdrawn(over=over)), "worker.withdrawn")
        self._report(over)

    def withdraw(self, withdraw: Withdraw, call: Call) -> bool:
        """Answer a withdrawal, at once or when the end is in the log. True if it has to wait."""
        over = self._core.withdraw(withdraw.key, withdraw.attempt)
        name = (withdraw.key, withdraw.attempt)
        if over and name not in self._stored:
            self._withdrawals.setdefault(name, []).append(call)
            return True
        answer = Withdrawn(over=over if isinstance(over, AttemptOver) else None)
        self._chores.spawn(call.reply(answer), "worker.withdrawn")
        return False

    def _report(self, over: AttemptOver) -> None:
        name = (over.key, over.attempt)
        if name not in self._asking:
            self._asking.add(name)
            self._chores.spawn(self._report_once(over), "worker.over")

    async def _report_once(self, over: AttemptOver) -> None:
        name = (over.key, over.attempt)
        try:
            await self._bus.request(subjects.over(over.replica), over, Settled, timeout_s=2.0)
            self._core.settled(*name)
            self._stored.discard(name)
        except (BusError, PeerError):
            pass  # reported again after retry_s
        finally:
            self._asking.discard(name)
