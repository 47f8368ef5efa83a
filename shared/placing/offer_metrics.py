"""The metrics of offers: how planners answered, and how long that took."""

from shared.schemas import OfferAnswer
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Registry

ANSWERS = ("accepted", "declined", "not_ready", "in_doubt")  # the tags of an OfferAnswer


class OfferMetrics:
    """The offers that one process made."""

    def __init__(self, metrics: Registry) -> None:
        self._offers = metrics.counter(names.OFFERS, "Offers to planners, by answer.", ("answer",))
        for answer in ANSWERS:
            self._offers.labels(answer)
        self._time = metrics.histogram(
            names.OFFER_TIME, "Time until an offer was answered.", names.STEP_BUCKETS_S
        ).labels()

    def answered(self, answer: OfferAnswer, seconds: float) -> None:
        self._offers.labels(str(answer.__struct_config__.tag)).add()
        self._time.observe(seconds)
