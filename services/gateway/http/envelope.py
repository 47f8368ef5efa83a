"""Turns failures into HTTP: status, OpenAI's envelope, headers. 429: contention; 503: no service
(both with Retry-After); 504: out of time. Never 408, which proxies retry at once.
"""

import math
from collections.abc import Iterable

from msgspec import Struct

from services.gateway.http.json_bytes import encode
from shared.bus.api import RefusedError
from shared.core.record.record import BREAKS_ENGINES, NO_MODEL, OVER_CONTEXT
from shared.errors import BusError, BusTimeout, NoResponders, PeerError
from shared.schemas import Refused, Verdict
from shared.vocabulary import FinishReason

RETRY_AFTER_MAX_S = 30
STATUS_OF_CODE = {
    "permission_denied": 403,
    "model_not_found": 404,
    "not_found": 404,
    "conflict": 409,
    "request_too_large": 413,
    "slow_down": 429,
    "resource_unavailable": 429,
    "rate_limit_exceeded": 429,
    "server_error": 500,
    "server_is_overloaded": 503,
}
TYPE_OF_STATUS = {
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}


class Error(Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str


class Envelope(Struct, frozen=True, kw_only=True):
    error: Error


class Problem(Struct, frozen=True, kw_only=True):
    """One failure. `dropped` is the value of x-llm-d-request-dropped-reason."""

    status: int
    message: str
    code: str
    param: str | None = None
    dropped: str | None = None
    retry_after_s: float | None = None
    challenge: str = "Bearer"  # of a 401

    def body(self) -> bytes:
        kind = TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return encode(
            Envelope(error=Error(message=self.message, type=kind, param=self.param, code=self.code))
        )

    def headers(self) -> dict[str, str]:
        """The headers. Retry-After is in whole seconds, rounded up, 1 to 30."""
        headers = {} if self.dropped is None else {"x-llm-d-request-dropped-reason": self.dropped}
        if self.status == 401:
            headers["www-authenticate"] = self.challenge
        if self.status == 415:
            headers["accept-encoding"] = "identity"
        if self.status in (429, 503):
            headers["retry-after"] = str(
                min(RETRY_AFTER_MAX_S, max(1, math.ceil(self.retry_after_s or 1.0)))
            )
        return headers


def written(problem: Problem, _: str) -> bytes:
    """The body of a failure in OpenAI's form, which does not name the request."""
    return problem.body()


class Rejected(Exception):
    """The gateway itself refuses, before it sends anything to admission."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def saturated(message: str, retry_after_s: float | None = None) -> Problem:
    """The failure of a request for which there is no room now."""
    return Problem(
        status=429,
        message=message,
        code="slow_down",
        dropped="rejected-saturated",
        retry_after_s=retry_after_s,
    )


def unserved(message: str, dropped: str = "rejected-no-endpoints") -> Problem:
    """The failure of a request for which no service is there now."""
    return Problem(status=503, message=message, code="server_is_overloaded", dropped=dropped)


NO_KEY = Problem(
    status=401,
    message="an API key is needed, in the header Authorization: Bearer KEY",
    code="invalid_api_key",
)
UNKNOWN_KEY = Problem(status=401, message="the API key is not known", code="invalid_api_key")
OTHER_TENANT = Problem(
    status=403,
    message="the API key is another tenant's",
    code="permission_denied",
    param="x-llm-d-inference-fairness-id",
)
SHUTTING_DOWN = unserved("this gateway is shutting down", "rejected-shutting-down")
SATURATED = saturated("the gateway has too many unfinished requests")
BODIES_FULL = saturated("the gateway is reading too many bytes of bodies at once")
BODY_TOO_SLOW = Problem(status=400, message="the body did not arrive in time", code="body_timeout")


# the first words of a verdict's message -> the code, where a client can tell more by it
INVALID_CODES = {
    OVER_CONTEXT: "context_length_exceeded",
    BREAKS_ENGINES: "breaks_engines",
    NO_MODEL: "model_not_found",
}


def body_too_large(limit_bytes: int) -> Problem:
    return Problem(
        status=413,
        message=f"the body has more than {limit_bytes:,} bytes",
        code="request_too_large",
    )


def too_many_copies(limit_bytes: int) -> Problem:
    return Problem(
        status=413,
        message=f"the body, once for each of n choices, has more than {limit_bytes:,} bytes",
        code="request_too_large",
        param="n",
    )


def body_encoded(encoding: str) -> Problem:
    return Problem(
        status=415,
        message=f"Content-Encoding: {encoding[:64]} is not supported: send the body as it is",
        code="unsupported_media_type",
        param="content-encoding",
    )


def no_such_model(name: str, served: Iterable[str]) -> Problem:
    """The failure of a request for a model or an adapter that no live replica has."""
    names = ", ".join(f"`{each}`" for each in served)
    there = f"this fleet serves {names}" if names else "no replica has been heard of"
    return Problem(
        status=404,
        message=f"unknown model `{name[:128]}`; {there}",
        code="model_not_found",
        param="model",
    )


def of_refused(no: Refused) -> Problem:
    """The failure of a request that admission refused before it stored anything."""
    status = STATUS_OF_CODE.get(no.code, 400)
    dropped = {429: "rejected-saturated", 503: "rejected-no-endpoints"}.get(status)
    if no.code == "rate_limit_exceeded":
        dropped = "rejected-rate-limited"
    # the parameter's name over HTTP
    param = {
        "token_ids": "prompt",
        "structured": "response_format",
        "adapter": "model",
        "request_id": "idempotency-key",
    }.get(no.param or "", no.param)
    return Problem(
        status=status,
        message=no.message,
        code=no.code,
        param=param,
        dropped=dropped,
        retry_after_s=no.retry_after_s,
    )


def of_error(error: PeerError | BusError) -> Problem:
    """The failure of a request that could not be read or handed over."""
    match error:
        case RefusedError():
            return of_refused(error.refused)
        case PeerError():
            return of_refused(Refused(code=error.code, message=error.message, param=error.param))
        case NoResponders():
            return unserved("no admission lets requests in: none is alive, or none can store them")
        case BusTimeout():
            return unserved(
                "admission did not answer in time: the request is withdrawn, unless it is "
                "for one choice and has an Idempotency-Key, with which it may be sent again"
            )
        case _:
            return unserved("the message bus is unreachable")


def of_verdict(verdict: Verdict, *, flex: bool) -> Problem | None:
    """The failure that a verdict means; None for a good end."""
    message, wait_s = verdict.message, verdict.retry_after_s
    match verdict.finish_reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.REFUSED | FinishReason.DROPPED as reason:
            said, dropped = "dropped under overload", "evicted-queue-pressure"
            if reason is FinishReason.REFUSED:
                said, dropped = "no replica can hold this request's SLO now", "rejected-saturated"
            return Problem(
                status=429,
                message=message or said,
                code="resource_unavailable" if flex else "slow_down",
                dropped=dropped,
                retry_after_s=wait_s,
            )
        case FinishReason.EXPIRED:
            return Problem(
                status=504,
                message=message or "the request expired unfinished",
                code="request_expired",
                dropped="rejected-ttl-expired",
            )
        case FinishReason.CANCELLED:
            return Problem(
                status=499,
                message=message or "the request was cancelled",
                code="request_cancelled",
                dropped="rejected-context-cancelled",
            )
        case FinishReason.INVALID:
            code = next(
                (code for words, code in INVALID_CODES.items() if message.startswith(words)),
                "unsupported_parameter",
            )
            return Problem(
                status=STATUS_OF_CODE.get(code, 400),
                message=message or "the engine cannot do what was asked for",
                code=code,
            )
        case FinishReason.FAILED:
            return Problem(status=500, message=message or "the request failed", code="server_error")
