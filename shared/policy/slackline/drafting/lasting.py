"""The time that iterations last with drafts, beside those without, by the number of decodes.

The profile and the cost of the draft model are corrected by one ratio each (shared/perf/online.py,
shared/perf/draft_correction.py), over iterations of every size, and without plain iterations the
profile cannot tell dear drafts from a slow machine. What that leaves decides where drafts begin to
lose. So here the seconds of a reference plan are known by size, with drafts and without, from what
iterations took beside their predictions.

On a CPU a plain pass right after one with drafts is slower than one after another plain pass
(docs/drafts.md). So no plain iteration right after drafts counts: the time that it loses is the
drafts'.

Either side is tried again now and then. While none draft, what is known of drafts is slowly
forgotten: the more they lose, the longer it takes until one iteration drafts. While all draft, one
is plain if drafts would lose by the prediction of plain ones as it was when one was last seen, and
so is the next one, which counts.
"""

from math import exp, inf, log
from typing import NamedTuple

from shared.policy.seam import Observation

WEIGHT = 0.05  # of one iteration, in the logarithm; the first weigh 1/2, 1/3, ...
SUDDEN = 4.0  # an iteration that lasted more than so many times what was predicted counts as that
FORGOTTEN = 0.002  # of what is known of drafts, by one iteration without
APART = 20  # iterations with drafts between two tries of a plain one


class Reference(NamedTuple):
    """The predicted seconds of one plan with drafts and of one without, as logarithms."""

    drafting: float
    plain: float


class Lasting:
    """Learns from iterations of decodes alone."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}  # by the binary digits of the number of decodes
        self._after_drafts = False

    def refer(self, decodes: int, drafting_s: float, plain_s: float) -> None:
        """The present prediction of a reference plan for so many decodes: always the same plan for
        the same number of digits.
        """
        size = self._sizes.setdefault(decodes.bit_length(), _Size())
        size.now = Reference(log(drafting_s), log(plain_s))
        if size.last_plain == inf:
            size.last_plain = size.now.plain

    def factor(self, decodes: int) -> float:
        """The predicted seconds with drafts are to be multiplied by this, beside those without."""
        size = self._sizes.get(decodes.bit_length())
        return 1.0 if size is None else size.factor

    def doubt(self, decodes: int) -> float:
        """The predicted seconds of a plain iteration are this many times longer than when one was
        last seen; 1 if that was lately.
        """
        size = self._sizes.get(decodes.bit_length())
        if size is None or size.since_plain < APART:
            return 1.0
        return exp(max(size.now.plain - size.last_plain, 0.0))

    def observe(self, seen: Observation) -> None:
        shape, after_drafts = seen.shape, self._after_drafts
        self._after_drafts = seen.drafts is not None
        size = self._sizes.get(shape.decodes.bit_length())
        if size is None or shape.prefills or seen.predicted_s <= 0 or seen.exec_s <= 0:
            return
        took = (seen.exec_s + seen.late_s) / seen.predicted_s
        value = log(min(max(took, 1 / SUDDEN), SUDDEN))
        if seen.drafts is not None:
            size.drafted(value)
        else:
            size.forget(seen.iterations)
            if not after_drafts:
                size.plain(value, seen.iterations)


class _Size:
    """The knowledge of one number of decodes, in logarithms of the reference's seconds; None: as
    predicted.
    """

    __slots__ = ("_drafting", "_plain", "_seen", "last_plain", "now", "since_plain")

    def __init__(self) -> None:
        self.now = Reference(0.0, 0.0)
        self._drafting: float | None = None
        self._plain: float | None = None
        self._seen = [0, 0]  # with drafts, plain
        self.since_plain = 0  # iterations with drafts
        self.last_plain = inf  # the prediction when a plain one was last seen, or at the beginning

    @property
    def factor(self) -> float:
        drafting = 0.0 if self._drafting is None else self._drafting - self.now.drafting
        plain = 0.0 if self._plain is None else self._plain - self.now.plain
        return exp(drafting - plain)

    def drafted(self, value: float) -> None:
        self._drafting = self._toward(self._drafting, value, self.now.drafting, 0)
        self.since_plain += 1

    def plain(self, value: float, iterations: int) -> None:
        if iterations == 1:  # several were alike because they took what was predicted
            self._plain = self._toward(self._plain, value, self.now.plain, 1)
        self.since_plain, self.last_plain = 0, self.now.plain

    def forget(self, iterations: int) -> None:
        """So many were plain."""
        if self._drafting is not None:
            kept = (1 - FORGOTTEN) ** iterations
            self._drafting = self.now.drafting + kept * (self._drafting - self.now.drafting)

    def _toward(self, known: float | None, value: float, predicted: float, side: int) -> float:
        """`value`: the logarithm of measured over predicted seconds."""
        self._seen[side] += 1
        known = predicted if known is None else known
        weight = max(WEIGHT, 1 / (self._seen[side] + 1))
        return known + weight * (predicted + value - known)
