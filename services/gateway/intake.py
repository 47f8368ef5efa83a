"""From an HTTP request to a GenerateRequest: who asks (headers), for what (body), by when (tier or SLO headers)."""

import math
from collections.abc import Mapping

from msgspec import Struct

from services.gateway.completions import CompletionBody, read_body
from shared import subjects
from shared.client import new_request_id
from shared.errors import PeerError
from shared.schemas import GenerateRequest, Sampling
from shared.tiers import TierSet
from shared.vocabulary import Slo

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents for completions
REQUEST_ID = "x-request-id"
TENANT = "x-llm-d-inference-fairness-id"
TIER = "x-slackline-tier"
APPLICATION = "x-slackline-application"
ALLOW_RELEGATION = "x-slackline-allow-relegation"
# Bound of the SLO -> headers that give it in milliseconds, the first one present counts.
SLO_HEADERS = {
    "ttft_s": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tbt_s": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "ttlt_s": ("x-slackline-slo-ttlt-ms",),
}


class Ask(Struct, frozen=True, kw_only=True):
    """One completion as asked for. `service_tier` is what to echo while the request has not been relegated."""

    request: GenerateRequest
    tier: str
    service_tier: str
    flex: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


def read_request_id(headers: Mapping[str, str]) -> str:
    """The client's own, or a new one. Raises PeerError for one that could not be part of a subject."""
    given = headers.get(REQUEST_ID)
    return new_request_id() if given is None else subjects.check_id(given, REQUEST_ID)


def read_slo(headers: Mapping[str, str]) -> Slo | None:
    """The request's own SLO. One that names any bound has only the bounds it names; None: the tier's SLO holds.

    Raises PeerError for anything but a positive, finite number of milliseconds.
    """
    bounds: dict[str, float] = {}
    for bound, names in SLO_HEADERS.items():
        for name in names:
            if bound in bounds or name not in headers:
                continue
            try:
                value_ms = float(headers[name])
            except ValueError:
                value_ms = math.nan
            if not 0 < value_ms < math.inf:
                raise PeerError(f"{name} must be a positive number of milliseconds", code="invalid_value", param=name)
            bounds[bound] = value_ms / 1000
    return Slo(**bounds) if bounds else None


def importance_of(priority: int | None) -> float:
    """vLLM's integer (0 is usual, higher matters more here) as a weight: ... -1 -> 1/2, 0 -> 1, 1 -> 2, 2 -> 3 ..."""
    p = priority or 0
    return 1.0 + p if p >= 0 else 1.0 / (1 - p)


def read_flag(headers: Mapping[str, str], name: str, default: bool) -> bool:
    """`true` or `false`. Raises PeerError for anything else."""
    given = headers.get(name, "true" if default else "false").lower()
    if given not in ("true", "false"):
        raise PeerError(f"{name} must be true or false", code="invalid_value", param=name)
    return given == "true"


def read_ask(headers: Mapping[str, str], raw: bytes, request_id: str, tiers: TierSet) -> Ask:
    """Raises PeerError, naming the field or the header at fault. What depends on the model is left to admission."""
    body = read_body(raw)
    named = headers.get(TIER)
    tier = tiers.for_service_tier(body.service_tier) if named is None else named
    service_tier = tiers.named(tier).service_tier
    asked = body.service_tier if named is None and body.service_tier not in (None, "auto") else service_tier
    options = body.stream_options
    return Ask(
        request=GenerateRequest(
            request_id=request_id,
            tenant=subjects.check_id(headers.get(TENANT, "default"), TENANT),
            model=body.model,
            prompt=body.prompt if isinstance(body.prompt, str) else None,
            token_ids=body.prompt if isinstance(body.prompt, list) else None,
            sampling=sampling_of(body),
            slo=read_slo(headers),
            importance=importance_of(body.priority),
            application=headers.get(APPLICATION, "")[:128],
            session=body.user or "",
            allow_relegation=read_flag(headers, ALLOW_RELEGATION, True),
        ),
        tier=tier,
        service_tier=asked or tier,
        flex=service_tier == "flex",
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )


def sampling_of(body: CompletionBody) -> Sampling:
    stop = body.stop if body.stop is not None else []
    return Sampling(
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=body.seed,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
    )
