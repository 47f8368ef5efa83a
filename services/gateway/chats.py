"""OpenAI's chat completions on the wire: the request of POST /v1/chat/completions and its answer.

A field that would change the answer and is not implemented (tools, audio ...) is refused. A field
that only labels a request (metadata, identifiers, cache hints) is accepted. A field that leaves the
choice of a tool to the model is accepted, since there are no tools to choose from.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.gateway import asking
from services.gateway.asking import Alternatives, AskBody, Prompt, ShortString
from services.gateway.dialect import Output
from services.gateway.likelihoods import ChatLogprobs, of_chat
from shared.errors import PeerError
from shared.schemas import Delta, TokenLogprob

WHATEVER_FITS = 1_000_000  # admission cuts it to the room that the prompt leaves
# One message bounds an answer with log-probabilities: this many tokens fit, with 20 alternatives
# each.
FITS_WITH_LOGPROBS = 8192


class ChatBody(AskBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat request. Admission checks the messages when it renders them, since it has
    the model's template.
    """

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    # Accepted without effect:
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_retention: ShortString | None = None
    safety_identifier: ShortString | None = None
    # Names a session, as `user` does, and has priority over it:
    prompt_cache_key: ShortString | None = None
    # Accepted with their neutral value only:
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    reasoning_effort: Any = None
    store: bool | None = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @property
    def prompts(self) -> list[Prompt]:
        return [Prompt(messages=self.messages)]

    @property
    def default_max_tokens(self) -> int:
        return WHATEVER_FITS if self.alternatives is None else FITS_WITH_LOGPROBS

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    @property
    def dialect(self) -> "ChatDialect":
        return ChatDialect(logprobs=bool(self.logprobs), token_ids=bool(self.return_token_ids))


_BODY = msgspec.json.Decoder(ChatBody)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **asking.NEUTRAL,
    "audio": (None,),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
    "tool_choice": (None, "auto", "none"),
    "tools": (None, []),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


def read_body(raw: bytes) -> ChatBody:
    """Raises PeerError, naming the field where there is one."""
    body = asking.read(_BODY, raw, _NEUTRAL)
    if body.top_logprobs is not None and not body.logprobs:
        raise PeerError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return body


class Message(Struct, frozen=True, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One choice of a whole answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: list[int] | UnsetType = UNSET


class MessageDelta(Struct, frozen=True, kw_only=True):
    """The new part of a message; empty in a choice's last chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One choice in a chunk of a stream."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


_OPENING = MessageDelta(role="assistant", content="", refusal=None)
_CLOSING = MessageDelta()


class ChatVoice:
    """Writes one choice of a chat."""

    def __init__(self, index: int, *, logprobs: bool, token_ids: bool) -> None:
        self._index = index
        self._logprobs = logprobs
        self._token_ids = token_ids

    def whole(self, output: Output, finish_reason: str) -> ChatChoice:
        return ChatChoice(
            index=self._index,
            message=Message(content=output.text),
            logprobs=self._likely(output.logprobs),
            finish_reason=finish_reason,
            token_ids=output.tokens if self._token_ids else UNSET,
        )

    def open(self) -> Sequence[ChatChunk]:
        return (ChatChunk(index=self._index, delta=_OPENING),)

    def say(self, delta: Delta) -> Sequence[ChatChunk]:
        said = ChatChunk(
            index=self._index,
            delta=MessageDelta(content=delta.text),
            logprobs=self._likely(delta.logprobs),
            token_ids=delta.tokens if self._token_ids else UNSET,
        )
        return (said,)

    def close(self, finish_reason: str) -> Sequence[ChatChunk]:
        return (ChatChunk(index=self._index, delta=_CLOSING, finish_reason=finish_reason),)

    def _likely(self, known: Sequence[TokenLogprob]) -> ChatLogprobs | None:
        return of_chat(known) if known and self._logprobs else None


class ChatDialect:
    """The chat API. Implements Dialect."""

    operation = "chat"
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, logprobs: bool, token_ids: bool) -> None:
        self._logprobs = logprobs
        self._token_ids = token_ids

    def voice(self, index: int) -> ChatVoice:
        return ChatVoice(index, logprobs=self._logprobs, token_ids=self._token_ids)
