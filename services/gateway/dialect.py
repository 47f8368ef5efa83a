"""The parts of an answer in either API: a frame, and choices that a voice each writes."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from shared.schemas import Delta, TokenLogprob


class Output:
    """The output of one choice so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # along `tokens`, or empty
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self._texts.append(delta.text)


class Voice(Protocol):
    """Writes one choice, whole or chunk by chunk. A chunk is a choice with only its new part."""

    def whole(self, output: Output, finish_reason: str) -> Struct: ...

    def open(self) -> Sequence[Struct]:
        """The chunks of a choice that come before the first text of any choice."""

    def say(self, delta: Delta) -> Sequence[Struct]: ...

    def close(self, finish_reason: str) -> Sequence[Struct]: ...


class Dialect(Protocol):
    """The form of an answer in one API."""

    @property
    def operation(self) -> str:
        """The operation's name in OpenTelemetry."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def voice(self, index: int, request_id: str, tool_format: str) -> Voice:
        """`request_id`: of the whole answer. `tool_format`: the form in which its model writes
        calls of tools.
        """


class PromptDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts. Those of the cache are known at the end of each choice.
    `completion_tokens_details` is set once a choice has ended whose SLO names a
    pace for thinking.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails(cached_tokens=0)
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Reply(Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of a stream. `service_tier` is the tier actually used, as far as
    it is known by then.
    """

    id: str
    object: str
    created: int  # unix seconds
    model: str
    choices: Sequence[Struct]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
