"""Checks the clocks of the hosts that a fleet runs on, as its services report them, for
`/ready`.
"""

from shared.clock import Clock
from shared.process.fleet_time import SYNC_S, UNREADY_S
from shared.schemas import TimeTold

FRESH_S = 3 * SYNC_S  # a process that is silent for longer has ended
LIMIT = 1024  # processes that are remembered: two for each of the 256 workers, and room


class Clocks:
    """The newest offset that each process has told of its host's clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heard: dict[str, tuple[float, TimeTold]] = {}

    def hear(self, told: TimeTold) -> None:
        if told.instance in self._heard or len(self._heard) < LIMIT:
            self._heard[told.instance] = self._clock.unix_s(), told

    def off(self) -> str:
        """A service none of whose clocks is within UNREADY_S, in words; empty: there is none."""
        if abs(own_s := self._clock.host_ahead_s()) > UNREADY_S:
            return _in_words("this gateway", own_s)
        oldest_unix_s = self._clock.unix_s() - FRESH_S
        self._heard = {name: seen for name, seen in self._heard.items() if seen[0] >= oldest_unix_s}
        nearest: dict[str, TimeTold] = {}
        for _, told in self._heard.values():
            best = nearest.setdefault(told.service, told)
            if abs(told.host_ahead_s) < abs(best.host_ahead_s):
                nearest[told.service] = told
        for told in nearest.values():
            if told.service != "gateway" and abs(told.host_ahead_s) > UNREADY_S:
                return _in_words(f"{told.service} ({told.instance})", told.host_ahead_s)
        return ""


def _in_words(who: str, ahead_s: float) -> str:
    direction = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of the host of {who} is {abs(ahead_s):.0f} s {direction} the fleet's:"
        " run NTP there"
    )
