"""The order in which one replica is handed requests of equals: what it has of a prompt counts as
age. The wait of each is divided by the part of the prompt that is new there.

Source: the highest response ratio, P. Brinch Hansen, "Short-term scheduling in multiprogramming
systems", SOSP 1971; deviation: the time of a prefill counts relative to the same without a prefix,
so requests of which nothing is kept go by age. None waits for ever: the wait of all grows alike.
"""

from collections.abc import Callable, Iterator, Sequence

from shared.core.relegation.pool import Lane, lane_of
from shared.schemas import Record
from shared.vocabulary import RequestKey

Equals = tuple[Lane, str, tuple[str, ...]]  # of one importance and tenant, model and needs


class Nearest:
    """The requests for one digest. `found`: the tokens of a prompt that the replica has. `looks`:
    the most requests to be looked up there; those beyond go by age.
    """

    def __init__(self, found: Callable[[Record], int], looks: int, now_unix_s: float) -> None:
        self._found, self._looks, self._now_unix_s = found, looks, now_unix_s
        self._lines: dict[Equals, Iterator[Record]] = {}

    def before(
        self, record: Record, line: Callable[[RequestKey, int], Sequence[Record]]
    ) -> RequestKey:
        """The request to be handed in place of this one, the oldest of its equals. `line`: so many
        of the oldest.
        """
        equals = lane_of(record), record.model, record.needs
        if equals not in self._lines:
            oldest = line(record.key, self._looks)
            self._looks -= len(oldest)
            self._lines[equals] = iter(sorted(oldest, key=self._age, reverse=True))
        return next(self._lines[equals], record).key

    def _age(self, record: Record) -> float:
        tokens = record.prompt_tokens + record.resume.measure.tokens
        new_fraction = 1 - self._found(record) / tokens
        return (self._now_unix_s - record.arrived_unix_s) / new_fraction
