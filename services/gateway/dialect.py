"""What an answer is made of, whichever API it is written in: choices, each in its own voice, in one
frame.
"""

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from shared.schemas import Delta, TokenLogprob


class Output:
    """What one choice has made so far."""

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
    """Writes one choice, whole or chunk by chunk; a chunk is a choice with what is new."""

    def whole(self, output: Output, finish_reason: str) -> Struct: ...

    def open(self) -> Sequence[Struct]:
        """What comes before anything is said, of any choice."""

    def say(self, delta: Delta) -> Sequence[Struct]: ...

    def close(self, finish_reason: str) -> Sequence[Struct]: ...


class Dialect(Protocol):
    """How one API writes one answer."""

    @property
    def operation(self) -> str:
        """As OpenTelemetry calls it."""

    @property
    def id_prefix(self) -> str: ...

    @property
    def whole_object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def voice(self, index: int) -> Voice: ...


class CompletionDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """`completion_tokens_details`: once a choice has ended that thought, as its SLO says that it
    does.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Reply(Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk of a stream. `service_tier` is the one actually used as far as
    it is known by then.
    """

    id: str
    object: str
    created: int  # unix seconds
    model: str
    choices: Sequence[Struct]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
