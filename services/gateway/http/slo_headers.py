"""Reads the headers that refine the SLO of a request's tier, and makes the request's own SLO."""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from shared.errors import PeerError
from shared.vocabulary import LONGEST_S, SHORTEST_S, Slo

NONE = "none"  # in place of milliseconds: the request goes without this bound of its tier
# SLO bound -> headers that give it in milliseconds; the first one present counts.
SLO_HEADERS = {
    "ttft_s": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tbt_s": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "ttlt_s": ("x-slackline-slo-ttlt-ms", "x-llm-d-slo-ttlt-ms", "x-slo-ttlt-ms"),
    "thinking_tbt_s": ("x-slackline-slo-thinking-tpot-ms",),
    "task_ttlt_s": ("x-slackline-slo-task-ttlt-ms",),
}
MULTIPLES = {"ttft_s": "ttft_x", "tbt_s": "tbt_x", "ttlt_s": "ttlt_x"}
LEAST_MS, MOST_MS = 1e3 * SHORTEST_S, 1e3 * LONGEST_S


def read_slo(headers: Mapping[str, str], of_tier: Slo) -> Slo | None:
    """The SLO of the request's tier with the bounds that the request names in place of its own;
    None: it names none. Raises PeerError, naming the header, for anything but NONE and milliseconds
    from 0.1 to a year.
    """
    bounds: dict[str, float | None] = {}
    for bound in SLO_HEADERS:
        name = _given(headers, bound)
        if name is not None:
            bounds[bound] = None if _is_none(headers[name]) else _read_ms(headers[name], name) / 1e3
            if bound in MULTIPLES:
                bounds[MULTIPLES[bound]] = None
    return replace(of_tier, **bounds) if bounds else None


def header_at_fault(headers: Mapping[str, str], param: str | None) -> str | None:
    """The header that gave the bound in admission's `param`; any other `param` as it is. Both paces
    are `slo.tbt_s` there: at fault is the tighter one.
    """
    bound = (param or "").removeprefix("slo.")
    if bound == param or bound not in SLO_HEADERS:
        return param
    bounds = ("tbt_s", "thinking_tbt_s") if bound == "tbt_s" else (bound,)
    named = [name for one in bounds if (name := _given(headers, one)) is not None]
    given = [name for name in named if not _is_none(headers[name])]
    return min(given, key=lambda name: float(headers[name]), default=param)


def _given(headers: Mapping[str, str], bound: str) -> str | None:
    """The header that gives this bound; None if none does."""
    return next((name for name in SLO_HEADERS[bound] if name in headers), None)


def _is_none(text: str) -> bool:
    return text.strip().lower() == NONE


def _read_ms(text: str, name: str) -> float:
    """Raises PeerError, naming the header."""
    try:
        value_ms = float(text)
    except ValueError:
        value_ms = math.nan
    if math.isnan(value_ms):
        wrong = f"a number of milliseconds, or `{NONE}`"
    elif value_ms < LEAST_MS:
        wrong = f"at least {LEAST_MS:g} ms"
    elif value_ms > MOST_MS:
        wrong = f"at most {MOST_MS:.0f} ms, a year"
    else:
        return value_ms
    raise PeerError(f"{name} must be {wrong}", code="invalid_value", param=name)
