"""Tells a planner that takes over the replica all that the worker holds (a resync), in pages."""

from collections.abc import Callable

import structlog
from msgspec.structs import replace

from services.worker.core.worker import WorkerCore
from shared import subjects
from shared.bus.api import Bus, Call
from shared.errors import BusError
from shared.prefix import pack_hashes
from shared.process.chores import Chores
from shared.schemas import Announce, Refused, Resync, ResyncPage
from shared.store.leases import lease_epoch
from shared.vocabulary import ReplicaId

log = structlog.get_logger()

PAGE_ENTRIES = 128  # 128 offers are about 30 KB, and with long prompts 250


class Resyncs:
    """A worker's answers to resyncs. `begun` is called as one begins: no earlier plan will run."""

    def __init__(
        self,
        core: WorkerCore,
        bus: Bus,
        replica: ReplicaId,
        chores: Chores,
        announcement: Callable[[], Announce],
        begun: Callable[[], None],
    ) -> None:
        self._core, self._bus, self._replica, self._chores = core, bus, replica, chores
        self._announcement, self._begun = announcement, begun
        self._waiting: list[tuple[Resync, Call]] = []
        # the newest that was answered: its sync, and the entries of all pages as they were then
        self._whole: tuple[int, ResyncPage] | None = None

    def on_resync(self, resync: Resync, call: Call) -> None:
        if resync.epoch > self._core.epoch + 1:
            self._chores.spawn(self._resync_if_leased(resync, call), "worker.resync")
        else:
            self._resync(resync, call)

    async def _resync_if_leased(self, resync: Resync, call: Call) -> None:
        """Obeys an epoch up to that of the planner's lease. To obey a higher one, which no planner
        has, would lock out all planners that come.
        """
        try:
            newest = await lease_epoch(self._bus.leases, subjects.planner_lease(self._replica))
        except BusError:
            return  # the planner asks again
        if resync.epoch <= newest:
            self._resync(resync, call)
            return
        log.warning("resync.refused", replica=self._replica, epoch=resync.epoch, lease=newest)
        self._refuse(call, "no_lease", f"no lease has epoch {resync.epoch}")

    def _resync(self, resync: Resync, call: Call) -> None:
        if resync.page == 0:
            if not self._core.resync(resync.epoch, resync.sync):
                self._refuse(call, "stale_epoch", f"epoch {self._core.epoch} was seen")
                return
            self._begun()
        self._waiting.append((resync, call))
        if not self._core.running:
            self.answer()

    def answer(self) -> None:
        """Between iterations: the entries of page 0 are kept, so that later pages agree with it."""
        waiting, self._waiting = self._waiting, []
        for resync, call in waiting:
            if resync.page == 0:
                self._whole = resync.sync, self._page()
            if self._whole is None or self._whole[0] != resync.sync:
                self._refuse(call, "stale_resync", "begin again at page 0")
                continue
            whole, begin = self._whole[1], resync.page * PAGE_ENTRIES
            page = replace(
                whole,
                announce=self._announcement(),
                next_seq=self._core.next_seq,
                entries=whole.entries[begin : begin + PAGE_ENTRIES],
                more=begin + PAGE_ENTRIES < len(whole.entries),
            )
            self._chores.spawn(call.reply(page), "worker.resync")

    def _page(self) -> ResyncPage:
        core = self._core
        kept, moved, _ = core.prefixes
        return ResyncPage(
            announce=self._announcement(),
            next_seq=core.next_seq,
            ack_seq=core.ack_seq,
            entries=core.entries(),
            more=False,
            shared_blocks=core.shared_blocks,
            draft_shared_blocks=core.draft_shared_blocks,
            kept=pack_hashes(kept),
            moved=pack_hashes(moved),
        )

    def _refuse(self, call: Call, code: str, message: str) -> None:
        self._chores.spawn(call.reply(Refused(code=code, message=message)), "worker.resync")
