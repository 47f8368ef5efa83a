"""The settings of relegation: section `relegation`, or SLACKLINE_RELEGATION_<FIELD>."""

from shared.process.configuration import Connected


class RelegationConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    list_s: float = 10.0
    """The time between two listings of the records. Hints come in between."""
    per_digest: int = 2
    """Requests handed to one replica before its next digest: more where it has no standard ones."""
    promote_margin: float = 2.0
    """An SLO counts as attainable if this many times the predicted time is left."""
    drain_s: float = 5.0
    """The longest stop."""
