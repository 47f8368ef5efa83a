"""The common part of chat and completion bodies, and its decoding. A field that we do not implement
is accepted only with its neutral value; admission refuses needs that no replica meets. `top_k`,
`min_p`, `min_tokens`, `repetition_penalty`, `structured_outputs`, `stop_token_ids`, `ignore_eos`,
`return_token_ids` and `priority` are vLLM's.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from services.gateway.api.formats import ResponseFormat, StructuredOutputs, wanted
from services.gateway.api.tools.definitions import Calls
from shared.errors import UNDECODABLE, PeerError
from shared.misfit import UNKNOWN, nearest
from shared.schemas import Bias, TokenId
from shared.structured import Structured

ShortString = Annotated[str, Meta(max_length=128)]
StopString = Annotated[str, Meta(min_length=1, max_length=256)]
Tokens = Annotated[int, Meta(ge=1)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]  # likely tokens returned beside each token

CHOICES_LIMIT = 16  # per prompt


class StreamOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    # vLLM's: usage so far with every chunk, if usage is asked for
    continuous_usage_stats: bool | None = None
    # padding against eavesdroppers on packet sizes: accepted, and never sent
    include_obfuscation: bool | None = None


class Prompt(NamedTuple):
    """One prompt. Exactly one field is set."""

    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None


class AnyBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that all three APIs share. `null` means the default, as in OpenAI's API."""

    model: ShortString | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] | None = None  # vLLM's -1 is our 0: all
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    user: ShortString | None = None
    service_tier: Annotated[str, Meta(max_length=64)] | None = None
    priority: Annotated[int, Meta(ge=-999, le=999)] | None = None


class AskBody(AnyBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats and completions share."""

    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=300)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens of output, under either name. Raises PeerError if the two differ."""
        if self.max_tokens is None or self.max_completion_tokens is None:
            return self.max_tokens or self.max_completion_tokens
        if self.max_tokens != self.max_completion_tokens:
            raise PeerError(
                "max_tokens and max_completion_tokens differ: give one of them",
                param="max_completion_tokens",
            )
        return self.max_tokens

    @property
    def ignored(self) -> list[str]:
        """The fields of this body that have no effect; the answer names them."""
        return []

    @property
    def structured(self) -> Structured | None:
        """The format of the output. Raises PeerError for an unknown format, or for two."""
        return wanted(self.response_format, self.structured_outputs)

    @property
    def calls(self) -> Calls | None:
        """The calls of tools that the answer may hold. Raises PeerError."""
        return None

    @property
    def template(self) -> dict[str, Any]:
        """Variables of the model's chat template."""
        return {}

    @property
    def session(self) -> str:
        """The session that the request belongs to: a task, if it has a deadline."""
        return self.user or ""


UNKNOWN_FIELD = "unknown_parameter"  # the code of a field of the body that is not known
UNSUPPORTED = "unsupported_parameter"  # the code of a value that is known and not served
# Unknown fields that are refused always: they hold an answer to a form, or are a part of the
# question, so an answer without them would be one to something else.
BINDING = frozenset(
    {
        "add_generation_prompt", "allowed_token_ids", "bad_words", "chat_template",
        "continue_final_message", "documents", "guided_choice", "guided_grammar", "guided_json",
        "guided_regex", "prompt_embeds", "structural_tag",
    }
)  # fmt: skip
PLACE_IN_ERROR = re.compile(r".* - at (?:`key` in )?`\$\.?([^`]*)`$")
FIELD_IN_ERROR = re.compile(r".*(?:missing required|unknown) field `([^`]+)`")
Body = TypeVar("Body", bound=Struct)


def read_leniently(
    read_body: Callable[[bytes], Body],
    raw: bytes,
    kind: type[Struct],
    ignorable: Mapping[str, tuple[Any, ...]],
) -> tuple[Body, list[str]]:
    """The body without the fields that this API does not serve, and their names, such as
    `tools.strict`. `ignorable`: those that it knows, with the values that ask for nothing. Raises
    PeerError.
    """
    try:
        return read_body(raw), []
    except PeerError as error:
        if error.code not in (UNKNOWN_FIELD, UNSUPPORTED):
            raise
        served, names = _without_unserved(raw, kind, ignorable)
        if not names:
            raise
    return read_body(served), names


def _without_unserved(
    raw: bytes, kind: type[Struct], ignorable: Mapping[str, tuple[Any, ...]]
) -> tuple[bytes, list[str]]:
    """The body without such fields, and their names; none of either where it is no JSON."""
    try:
        body = msgspec.json.decode(raw)
    except UNDECODABLE:  # what is broken stands behind the field that was refused
        return b"", []
    names = dict.fromkeys(_unknown(body, _type_of(kind), ""))
    for name in sorted(ignorable.keys() & body.keys()):
        if body[name] not in ignorable[name]:
            del body[name]
            names[name] = None
    return msgspec.json.encode(body), list(names)


_type_of = cache(inspect.type_info)


def _unknown(value: Any, kind: inspect.Type, place: str) -> Iterator[str]:
    """Take the fields that are not known out of a value. Yields their names."""
    if isinstance(kind, inspect.Metadata):
        yield from _unknown(value, kind.type, place)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:  # a union has one struct at most, and one list
            yield from _unknown(value, each, place)
    elif isinstance(kind, inspect.ListType) and isinstance(value, list):
        for item in value:
            yield from _unknown(item, kind.item_type, place)
    elif isinstance(kind, inspect.StructType) and isinstance(value, dict):
        known = {field.encode_name: field.type for field in kind.fields}
        for name in list(value):
            if name in known:
                yield from _unknown(value[name], known[name], f"{place}{name}.")
            elif place or name not in BINDING:
                del value[name]
                yield place + name


def read(
    decoder: msgspec.json.Decoder[Body], raw: bytes, neutral: Mapping[str, tuple[Any, ...]]
) -> Body:
    """Decode a body; fields in `neutral` have only values from there. PeerError names the field."""
    if not raw.strip():
        raise PeerError("the body is empty")
    try:
        body = decoder.decode(raw)
    except UNDECODABLE as wrong:
        # The message may quote the client's text, at any length.
        message = str(wrong)[:300]
        if (unknown := UNKNOWN.fullmatch(message)) is not None:
            known = [field.encode_name for field in msgspec.structs.fields(decoder.type)]
            raise PeerError(
                f"unknown field `{unknown[1]}`{_meant(unknown[1], known)}",
                code=UNKNOWN_FIELD,
                param=unknown[1],
            ) from None
        code = UNKNOWN_FIELD if UNKNOWN.match(message) else "invalid_request_error"
        raise PeerError(f"malformed body: {message}", code=code, param=_param(message)) from None
    for name, values in neutral.items():
        if getattr(body, name) not in values:
            accepted = msgspec.json.encode(values[-1]).decode()
            raise PeerError(
                f"{name} is not supported, except as {accepted}", code=UNSUPPORTED, param=name
            )
    return body


def _meant(unknown: str, known: Iterable[str]) -> str:
    """The field that somebody may have meant, in words; empty if none is like it."""
    if unknown.startswith("guided_") and "structured_outputs" in known:
        return "; in its place there is `structured_outputs`, as in vLLM"
    name = nearest(unknown, known)
    return f"; the nearest is `{name}`" if name else ""


def _param(message: str) -> str | None:
    """The field that a decoder's message is about, with its place in the body."""
    place, field = PLACE_IN_ERROR.match(message), FIELD_IN_ERROR.match(message)
    names = [found[1].replace("[...]", "") for found in (place, field) if found]
    return ".".join(name for name in names if name) or None
