"""The speed at which the fleet takes work out of the best-effort pool, as it was of late."""

import math
from collections import OrderedDict

from shared.schemas import Record
from shared.vocabulary import RequestKey

MEMORY_S = 30.0  # how far back the speed is remembered, in time in which requests waited
# Until it is measured, the speed counts as PRIOR of that of a fleet that does nothing else, for a
# flood leaves the pool little of a fleet. The guess weighs PRIOR_S of measuring, and fades alike.
PRIOR_S, PRIOR = 3.0, 0.05
LEAST = 0.01  # the part that best-effort gets at least (policy/slackline/policy.py)
TAKEN_LIMIT = 4096  # requests remembered, should they come back


class PoolRate:
    """Tokens of work a second, over the time in which requests waited and replicas were busy."""

    def __init__(self) -> None:
        self._tokens = self._waited_s = 0.0
        self._prior_s = PRIOR_S
        self._taken: OrderedDict[RequestKey, None] = OrderedDict()

    def waited(self, waited_s: float) -> None:
        kept = math.exp(-waited_s / MEMORY_S)
        self._tokens *= kept
        self._prior_s *= kept
        self._waited_s = self._waited_s * kept + waited_s

    def took(self, record: Record) -> None:
        self._tokens += record.work_tokens
        self._taken[record.key] = None
        if len(self._taken) > TAKEN_LIMIT:
            self._taken.popitem(last=False)

    def entered(self, record: Record) -> None:
        """The request waits. If a replica took it and gave it back, its work was not done."""
        if record.key in self._taken:
            del self._taken[record.key]
            self._tokens = max(self._tokens - record.work_tokens, 0.0)

    def tokens_s(self, idle_tokens_s: float) -> float:
        """The speed. `idle_tokens_s`: the speed of a fleet that does nothing else."""
        seen = (self._tokens + self._prior_s * PRIOR * idle_tokens_s) / (
            self._waited_s + self._prior_s
        )
        if idle_tokens_s:  # replicas take many requests at once, and do them later
            seen = min(seen, idle_tokens_s)
        return max(seen, LEAST * idle_tokens_s)
