"""The order in which idle blocks of a prefix cache give way."""

from collections import OrderedDict
from collections.abc import Iterator
from math import ceil, log2

SHORTEST_S, LONGEST_S = 1.0, 512.0  # that a block is kept, where it is at all


class Idle:
    """Blocks that nobody owns. The one that was left longest ago gives way first. One that is kept
    for a session's next round counts as left so many seconds later, rounded up to a power of two.
    """

    def __init__(self) -> None:
        # by the seconds for which they are kept: the blocks, with the instant until which they are
        self._lines: dict[float, OrderedDict[int, float]] = {}
        self._line_of: dict[int, OrderedDict[int, float]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._line_of

    def __len__(self) -> int:
        return len(self._line_of)

    def __iter__(self) -> Iterator[int]:
        return iter(self._line_of)

    def add(self, block: int, now_s: float, keep_s: float) -> None:
        """`now_s` never falls."""
        if keep_s > 0:
            keep_s = 2.0 ** ceil(log2(min(max(keep_s, SHORTEST_S), LONGEST_S)))
        line = self._lines.setdefault(keep_s, OrderedDict())
        line[block] = now_s + keep_s
        self._line_of[block] = line

    def renew(self, block: int, now_s: float) -> None:
        """The block, if it is idle, counts as left now."""
        if block in self._line_of:
            keep_s = next(s for s, line in self._lines.items() if line is self._line_of[block])
            self.discard(block)
            self.add(block, now_s, keep_s)

    def discard(self, block: int) -> None:
        line = self._line_of.pop(block, None)
        if line is not None:
            del line[block]

    def clear(self) -> None:
        self._lines.clear()
        self._line_of.clear()

    def pop(self) -> int:
        """The next block that gives way."""
        lines = [line for line in self._lines.values() if line]
        line = min(lines, key=lambda line: next(iter(line.values())))
        block = line.popitem(last=False)[0]
        del self._line_of[block]
        return block
