"""Writes clients' cancels into the records of requests, and ends those that no worker holds."""

from collections.abc import Callable

from services.admission.placement import Placement
from shared import subjects
from shared.bus.api import Call
from shared.core.record import record as life
from shared.errors import BusError, PeerError
from shared.process.chores import Chores
from shared.schemas import Cancel
from shared.store.records import Records
from shared.vocabulary import RequestKey


class Cancels:
    """The cancels at one instance. A cancel that comes before the record is stored waits for it."""

    def __init__(
        self, records: Records, placement: Placement, chores: Chores, soon: Callable[[], None]
    ) -> None:
        self._records, self._placement = records, placement
        self._chores, self._soon = chores, soon
        self._storing: dict[RequestKey, bool] = {}  # whether it was cancelled

    def storing(self, key: RequestKey) -> None:
        """A request of this key has come, and is not stored yet."""
        self._storing.setdefault(key, False)

    def cancelled(self, key: RequestKey) -> bool:
        """True if a request that is not stored yet was cancelled."""
        return self._storing.get(key, False)

    def stored(self, key: RequestKey) -> None:
        """The record is stored: a cancel that came meanwhile is written into it."""
        if self._storing.pop(key, False):
            self._chores.spawn(self.write(key), "admission.cancel")

    def forget(self, key: RequestKey) -> None:
        """The request of this key is stored, or was refused."""
        self._storing.pop(key, None)

    def on_cancel(self, cancel: Cancel, call: Call) -> None:
        tenant, request_id = call.subject.split(".")[-2:]
        try:
            key = subjects.request_key(tenant, request_id)
        except PeerError:
            return
        self._chores.spawn(self.write(key), "admission.cancel")

    def note(self, cancel: Cancel, call: Call) -> None:
        tenant, request_id = call.subject.split(".")[-2:]
        key = RequestKey(f"{tenant}.{request_id}")
        if key in self._storing:
            self._storing[key] = True

    async def write(self, key: RequestKey) -> None:
        """Mark the record as cancelled. Its worker hears the cancel itself; without one it ends."""
        try:
            await self._records.change(key, life.cancelled)
            await self._placement.end_cancelled(key)
        except BusError:
            self._soon()
