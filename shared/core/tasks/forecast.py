"""Forecasts the rounds of a task that are still to come, and the pauses before them, from the tasks
of its application before it. Nothing marks a task's last round: what is learned is how many tasks
reached each round.
"""

from bisect import bisect_left, insort
from collections import Counter, deque

WINDOW = 1024  # rounds that are remembered of an application: of some hundred tasks


class Recent:
    """The newest WINDOW values, and their median; 0 without any."""

    def __init__(self) -> None:
        self._values: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    @property
    def median(self) -> float:
        return self._sorted[len(self._sorted) // 2] if self._sorted else 0.0


class Forecast:
    """The tasks of one application. All that it answers is a median: a task may take longer as
    likely as not.
    """

    def __init__(self) -> None:
        self._numbers: deque[int] = deque()  # of the newest rounds, as they began
        self._reached: Counter[int] = Counter()  # rounds among them with each number
        self._pauses_s = Recent()

    def began(self, number: int, pause_s: float | None) -> None:
        """A round began, the first being 1; so long after the end of the one before, if known."""
        self._numbers.append(number)
        self._reached[number] += 1
        if len(self._numbers) > WINDOW:
            oldest = self._numbers.popleft()
            self._reached[oldest] -= 1
            if not self._reached[oldest]:
                del self._reached[oldest]
        if pause_s is not None:
            self._pauses_s.add(pause_s)

    def rounds_to_come(self, number: int) -> int:
        """The median number of rounds after this one. How many tasks go on after a round is
        estimated by the rule of succession, so that what was never seen counts as even.
        """
        goes_on, rounds = 1.0, 0
        while True:
            here, after = self._reached[number + rounds], self._reached[number + rounds + 1]
            goes_on *= (min(here, after) + 1) / (here + 2)
            if goes_on <= 0.5:
                return rounds
            rounds += 1

    @property
    def pause_s(self) -> float:
        """The median of the pauses between rounds: what tools and people take."""
        return self._pauses_s.median
