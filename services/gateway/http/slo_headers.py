"""The headers that give a request an SLO of its own."""

import math
from collections.abc import Mapping

from shared.errors import PeerError
from shared.rules.tiers import Tier
from shared.vocabulary import LONGEST_S, SHORTEST_S, Slo

# SLO bound -> headers that give it in milliseconds; the first one present counts.
SLO_HEADERS = {
    "ttft_s": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tbt_s": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "ttlt_s": ("x-slackline-slo-ttlt-ms", "x-llm-d-slo-ttlt-ms", "x-slo-ttlt-ms"),
    "thinking_tbt_s": ("x-slackline-slo-thinking-tpot-ms",),
}
LEAST_MS, MOST_MS = 1e3 * SHORTEST_S, 1e3 * LONGEST_S


def read_slo(headers: Mapping[str, str], tier: Tier) -> Slo | None:
    """The request's own SLO, judged as its tier is; None: the tier's SLO holds. It has only the
    bounds that the request names. Raises PeerError, naming the header, for anything but
    milliseconds from 0.1 to a year.
    """
    bounds: dict[str, float] = {}
    for bound in SLO_HEADERS:
        name = _given(headers, bound)
        if name is not None:
            bounds[bound] = _read_ms(headers[name], name) / 1000
    return Slo(**bounds, definition=tier.slo.definition) if bounds else None


def header_at_fault(headers: Mapping[str, str], param: str | None) -> str | None:
    """The header that gave the bound in admission's `param`; any other `param` as it is. Both paces
    are `slo.tbt_s` there: at fault is the tighter one.
    """
    bound = (param or "").removeprefix("slo.")
    if bound == param or bound not in SLO_HEADERS:
        return param
    bounds = ("tbt_s", "thinking_tbt_s") if bound == "tbt_s" else (bound,)
    given = [name for one in bounds if (name := _given(headers, one)) is not None]
    return min(given, key=lambda name: float(headers[name]), default=param)


def _given(headers: Mapping[str, str], bound: str) -> str | None:
    """The header that gives this bound; None if none does."""
    return next((name for name in SLO_HEADERS[bound] if name in headers), None)


def _read_ms(text: str, name: str) -> float:
    """Raises PeerError, naming the header."""
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = math.nan
    if math.isnan(value_ms):
        wrong = "a number of milliseconds"
    elif value_ms < LEAST_MS:
        wrong = f"at least {LEAST_MS:g} ms"
    elif value_ms > MOST_MS:
        wrong = f"at most {MOST_MS:.0f} ms, a year"
    else:
        return value_ms
    raise PeerError(f"{name} must be {wrong}", code="invalid_value", param=name)
