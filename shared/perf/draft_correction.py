"""The cost of a replica's draft model, corrected by acks that say how long drafting took."""

from dataclasses import replace

from shared.perf.draft import Draft

WEIGHT = 0.05  # of one iteration, in the logarithm
SUDDEN = 4.0  # an iteration counts as at most this many times its prediction
FARTHEST = 10.0  # the largest factor from the announced cost


class DraftCorrection:
    """`now`: the draft model as policies see it, or None. The correction learns the ratio of
    measured to predicted steps, and takes that of reading to be the same. It leaves out iterations
    in which the draft begins with a request: only the engine knows how much its cache held.
    """

    def __init__(self, announced: Draft | None) -> None:
        self.now = self._announced = announced
        self._scale = 1.0

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Learn how long drafting took, and what `now` predicted. 0: no drafting, or unknown."""
        announced = self._announced
        if announced is None or predicted_s <= 0 or measured_s <= 0:
            return
        ratio = min(max(measured_s / predicted_s, 1 / SUDDEN), SUDDEN)
        scale = self._scale * ratio**WEIGHT
        self._scale = min(max(scale, 1 / FARTHEST), FARTHEST)
        self.now = replace(
            announced,
            step=min(announced.step * self._scale, 1.0),
            read=min(announced.read * self._scale, 1.0),
        )
