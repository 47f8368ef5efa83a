"""Reads the headers of a request: our own, and those of others that we understand."""

from collections.abc import Mapping
from difflib import get_close_matches
from hashlib import sha256

from services.gateway.http.slo_headers import SLO_HEADERS
from shared import subjects
from shared.client.client import new_request_id
from shared.errors import PeerError
from shared.rules.tiers import TierSet

IDEMPOTENCY_KEY = "idempotency-key"  # names the request: sent again, it attaches to it
CORRELATION_ID = "x-request-id"  # is the client's own; several requests may have the same
CORRELATION_LIMIT = 256  # characters
# the first header present counts
TIER_HEADERS = ("x-slackline-tier", "x-llm-d-inference-objective")
APPLICATION = "x-slackline-application"
ALLOW_RELEGATION = "x-slackline-allow-relegation"
LENIENT = "x-slackline-lenient"  # unknown fields of the body are ignored
IGNORED = "x-slackline-ignored"  # in the answer: their names
VERDICT = "x-slackline-verdict"  # the answer tells whether its SLO was met
# the headers that are ours by their names: a mistyped one is refused, for it would do nothing
PREFIXES = ("x-slackline-", "x-llm-d-slo-", "x-slo-")
KNOWN = (
    *(name for names in SLO_HEADERS.values() for name in names),
    TIER_HEADERS[0],
    APPLICATION,
    ALLOW_RELEGATION,
    LENIENT,
    VERDICT,
)


def read_request_id(headers: Mapping[str, str]) -> str:
    """The id that the client's key stands for, or a new one. A key that is no id (a dot, a space,
    over 64 characters) stands for its digest. Raises PeerError for an empty key.
    """
    given = headers.get(IDEMPOTENCY_KEY)
    if given is None:
        return new_request_id()
    if not given:
        raise PeerError("Idempotency-Key is empty", code="invalid_id", param=IDEMPOTENCY_KEY)
    try:
        return subjects.check_id(given, IDEMPOTENCY_KEY)
    except PeerError:
        return f"key-{sha256(given.encode()).hexdigest()[:48]}"


def read_correlation_id(headers: Mapping[str, str]) -> str:
    """The client's correlation id; empty where it has none that can be sent back as it is."""
    given = headers.get(CORRELATION_ID, "")
    fit = len(given) <= CORRELATION_LIMIT and given.isascii() and given.isprintable()
    return given if fit else ""


def check_names(headers: Mapping[str, str]) -> None:
    """Raises PeerError for a header that is ours by its prefix, and that nobody reads."""
    for name in headers:
        if name.startswith(PREFIXES) and name not in KNOWN:
            nearest_first = get_close_matches(name, KNOWN, len(KNOWN), 0.0)
            raise PeerError(
                f"unknown header `{name[:64]}`; known, the nearest first: "
                f"{', '.join(nearest_first)}",
                param=name[:64],
            )


def read_flag(headers: Mapping[str, str], name: str, default: bool) -> bool:
    """Reads `true` or `false`. Raises PeerError for anything else."""
    given = headers.get(name, "true" if default else "false").lower()
    if given not in ("true", "false"):
        raise PeerError(f"{name} must be true or false", code="invalid_value", param=name)
    return given == "true"


def read_tier(
    headers: Mapping[str, str], service_tier: str | None, tiers: TierSet
) -> tuple[str, str]:
    """The tier, and the client's name for it. Headers go before the body. Raises PeerError, naming
    the header or the field.
    """
    for name in TIER_HEADERS:
        if name in headers:
            tier = headers[name]
            try:
                return tier, tiers.named(tier).service_tier or tier
            except PeerError as error:
                raise PeerError(error.message, code=error.code, param=name) from None
    tier = tiers.for_service_tier(service_tier)
    asked = service_tier if service_tier not in (None, "auto") else None
    return tier, asked or tiers.named(tier).service_tier or tier
