"""The settings of a relegation process: section `relegation`, or SLACKLINE_RELEGATION_<FIELD>."""

from typing import Annotated

from msgspec import Meta

from shared.process.configuration import Connected, Constant


class RelegationConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    drain_s: float = 5.0
    """The longest drain. The process ends within 5 s of it, whatever NATS does."""

    warm_up_s: Annotated[float, Meta(ge=0, le=3600)] = 120.0
    """The time from the decision to start a replica until it serves, for the replicas needed."""

    # ------------------------------------------------------------ constants

    # The time between two listings of the records. Hints come in between.
    list_s: Constant[float] = 10.0
    # Requests handed to one replica before its next digest: more where it has no standard
    # ones.
    per_digest: Constant[int] = 2
    # An SLO counts as attainable if this many times the predicted time is left.
    promote_margin: Constant[float] = 2.0
