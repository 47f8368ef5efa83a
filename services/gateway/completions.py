"""OpenAI's completions on the wire: what a client may send, and what it gets.

Fields that we do not implement are accepted with their neutral value only; a request is never served as something it did
not ask for. `top_k`, `stop_token_ids`, `ignore_eos` and `return_token_ids` are vLLM's.
"""

import re
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from shared.errors import PeerError

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class CompletionBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. `null` is the default, as in OpenAI's API."""

    prompt: str | list[TokenId]
    model: Annotated[str, Meta(max_length=128)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # vLLM's -1 is our 0: all
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: Annotated[str, Meta(max_length=128)] | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    priority: Annotated[int, Meta(ge=-999, le=999)] | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
    "frequency_penalty": (None, 0.0),
    "presence_penalty": (None, 0.0),
    "logit_bias": (None, {}),
}
FIELD_IN_ERROR = re.compile(r"\$\.([a-z_]+)|field `([^`]+)`")
_BODY = msgspec.json.Decoder(CompletionBody)


def read_body(raw: bytes) -> CompletionBody:
    """Raises PeerError, naming the field where there is one."""
    try:
        body = _BODY.decode(raw)
    except (msgspec.DecodeError, RecursionError) as wrong:
        # What they sent may be in it, at any length.
        message = str(wrong)[:300]
        found = FIELD_IN_ERROR.search(message)
        raise PeerError(f"malformed body: {message}", param=found and (found[1] or found[2])) from None
    for name, neutral in NEUTRAL.items():
        if getattr(body, name) not in neutral:
            raise PeerError(f"{name} is not supported, except as {neutral[-1]!r}", code="unsupported_parameter", param=name)
    return body


class Usage(Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(Struct, frozen=True, kw_only=True):
    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of a stream. `service_tier` is the one actually used as far as it is known by then."""

    id: str
    created: int  # unix seconds
    model: str
    choices: list[Choice]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Model(Struct, frozen=True, kw_only=True):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "slackline"


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model] = field(default_factory=list)
    object: str = "list"
