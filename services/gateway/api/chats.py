"""OpenAI's chat completions: POST /v1/chat/completions and its answer. A field that would change
the answer and is not implemented (audio ...) is refused; a field that only labels is accepted.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal, assert_never

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from services.gateway.api import asking
from services.gateway.api.api_format import Frame, Head, Output, ReplyFrame
from services.gateway.api.asking import Alternatives, AskBody, Prompt, ShortString
from services.gateway.api.logprobs import ChatLogprobs, of_chat
from services.gateway.api.thinking import ThinkingReader
from services.gateway.api.tools import definitions as tools
from services.gateway.api.tools.call_readers import (
    Arguments,
    Called,
    CallReader,
    JsonReader,
    NamedReader,
    Piece,
    Said,
    Thought,
    reader,
)
from services.gateway.api.tools.definitions import Calls, ToolChoice, Tools
from shared.errors import PeerError
from shared.schemas import Delta, Thinking, TokenLogprob
from shared.text.tool_format import ToolFormat

WHATEVER_FITS = 1_000_000  # admission cuts it to the room that the prompt leaves
# The tokens whose log-probabilities, with 20 alternatives each, one message can hold.
FITS_WITH_LOGPROBS = 8192


class ChatBody(AskBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat request. Admission checks the messages: it has the model's template."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted without effect:
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None
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
    store: bool | None = None
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
    def calls(self) -> Calls | None:
        return tools.read(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template(self) -> dict[str, Any]:
        """Variables of published templates: most read the effort, Qwen's only whether to think."""
        effort: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            effort = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return effort | (self.chat_template_kwargs or {})

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    def api_format(self, *, held: bool) -> "ChatFormat":
        """`held`: the engine holds a required call to its format."""
        return ChatFormat(
            self.calls,
            held=held,
            logprobs=bool(self.logprobs),
            token_ids=bool(self.return_token_ids),
        )


_BODY = msgspec.json.Decoder(ChatBody)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None, "auto", "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}


# left out by a lenient reader
IGNORABLE = {
    name: _NEUTRAL[name]
    for name in (
        "moderation", "prediction", "prompt_cache_options", "store", "verbosity",
        "web_search_options",
    )
}  # fmt: skip


def read_body(raw: bytes) -> ChatBody:
    """Raises PeerError, naming the field where there is one."""
    body = asking.read(_BODY, raw, _NEUTRAL)
    if body.top_logprobs is not None and not body.logprobs:
        raise PeerError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return body


class CalledFunction(Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str = ""  # JSON


class ToolCall(Struct, frozen=True, kw_only=True):
    """A call, or the new part of one."""

    index: int | UnsetType = UNSET  # in streams
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: CalledFunction


class Message(Struct, frozen=True, kw_only=True):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET  # its thinking, as vLLM and others have it
    tool_calls: list[ToolCall] | UnsetType = UNSET


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
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    """One choice in a chunk of a stream."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


_OPENING = MessageDelta(role="assistant", content="", refusal=None)
_CLOSING = MessageDelta()


class ChatChoiceWriter:
    """Writes one choice of a chat. `thinking` finds the thinking in its text, and `calls` the calls
    of tools in the rest; None: there are none.
    """

    def __init__(
        self,
        index: int,
        calls: CallReader | None,
        id_of_call: Callable[[int], str],
        thinking: ThinkingReader | None = None,
        *,
        parallel: bool,
        named: bool,
        logprobs: bool,
        token_ids: bool,
    ) -> None:
        """`parallel`: the choice may hold several calls. `named`: the request named the tool."""
        self._index = index
        self._calls = calls
        self._id_of_call = id_of_call
        self._thinking = thinking
        self._parallel = parallel
        self._named = named
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._called = 0
        # of tokens whose text is not told yet
        self._likely: list[TokenLogprob] = []
        self._tokens: list[int] = []

    def whole(self, output: Output, finish_reason: str) -> ChatChoice:
        texts, thoughts = list[str](), list[str]()
        begun, arguments = list[ToolCall](), list[list[str]]()
        for delta in self._deltas(self._pieces(output.text, over=True)):
            texts.append(delta.content or "")
            thoughts.append(delta.reasoning_content or "")
            for part in delta.tool_calls or ():
                if part.id is not UNSET:
                    begun.append(part)
                    arguments.append([])
                arguments[-1].append(part.function.arguments)
        content = "".join(texts)
        calls = [
            replace(call, index=UNSET, function=replace(call.function, arguments="".join(parts)))
            for call, parts in zip(begun, arguments, strict=True)
        ]
        return ChatChoice(
            index=self._index,
            message=Message(
                content=content or (None if calls else ""),
                reasoning_content="".join(thoughts) or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=of_chat(output.logprobs) if output.logprobs and self._logprobs else None,
            finish_reason=self._reason(finish_reason),
            token_ids=output.tokens if self._token_ids else UNSET,
        )

    def open(self) -> Sequence[ChatChunk]:
        return (ChatChunk(index=self._index, delta=_OPENING),)

    def say(self, delta: Delta) -> Sequence[ChatChunk]:
        self._likely += delta.logprobs
        self._tokens += delta.tokens
        return self._chunks(self._deltas(self._pieces(delta.text)))

    def close(self, finish_reason: str) -> Sequence[ChatChunk]:
        rest = self._chunks(self._deltas(self._pieces("", over=True)))
        if self._owes_tokens:
            rest = [*rest, *self._chunks([_CLOSING])]
        reason = self._reason(finish_reason)
        return (*rest, ChatChunk(index=self._index, delta=_CLOSING, finish_reason=reason))

    def _pieces(self, text: str, *, over: bool = False) -> list[Piece]:
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.feed(text)
            if over:
                rest = self._thinking.finish()
                thought, text = thought + rest[0], text + rest[1]
        pieces: list[Piece] = [Thought(thought)] if thought else []
        if self._calls is None:
            if text or (self._owes_tokens and not pieces):
                pieces.append(Said(text))
            return pieces
        return [*pieces, *self._calls.feed(text), *(self._calls.finish() if over else ())]

    @property
    def _owes_tokens(self) -> bool:
        """Tells whether ids or log-probabilities that the client asked for are not written yet."""
        return bool(self._logprobs and self._likely) or bool(self._token_ids and self._tokens)

    def _deltas(self, pieces: Sequence[Piece]) -> list[MessageDelta]:
        """The new parts of the message, without further calls where it may hold only one."""
        return [delta for piece in pieces if (delta := self._delta(piece)) is not None]

    def _delta(self, piece: Piece) -> MessageDelta | None:
        match piece:
            case Thought(text):
                return MessageDelta(reasoning_content=text)
            case Said(text):
                return MessageDelta(content=text)
            case Called(number, name):
                self._called = number + 1
                function, call_id = CalledFunction(name=name), self._id_of_call(number)
                call = ToolCall(index=number, id=call_id, type="function", function=function)
            case Arguments(text):
                function = CalledFunction(arguments=text)
                call = ToolCall(index=self._called - 1, function=function)
            case _:
                assert_never(piece)
        if self._called > 1 and not self._parallel:
            return None
        return MessageDelta(tool_calls=[call])

    def _chunks(self, deltas: Sequence[MessageDelta]) -> list[ChatChunk]:
        """Chunks of the new parts. The first has all tokens since the last one."""
        chunks = []
        for delta in deltas:
            likely, self._likely = self._likely, []
            tokens, self._tokens = self._tokens, []
            chunks.append(
                ChatChunk(
                    index=self._index,
                    delta=delta,
                    logprobs=of_chat(likely) if likely and self._logprobs else None,
                    token_ids=tokens if self._token_ids else UNSET,
                )
            )
        return chunks

    def _reason(self, finish_reason: str) -> str:
        """The reason that the client is told: `tool_calls` if the model itself chose to call."""
        calls = self._called and not self._named and finish_reason == "stop"
        return "tool_calls" if calls else finish_reason


class ChatFormat:
    """The chat API. Implements ApiFormat (services/gateway/api/api_format.py)."""

    operation = "chat"

    def __init__(self, calls: Calls | None, *, held: bool, logprobs: bool, token_ids: bool) -> None:
        self._calls = calls
        self._held = held
        self._logprobs = logprobs
        self._token_ids = token_ids

    def frame(self, head: Head) -> Frame:
        return ReplyFrame(head, "chatcmpl", "chat.completion", "chat.completion.chunk")

    def writer(
        self, index: int, request_id: str, tool_format: str, thinking: Thinking | None
    ) -> ChatChoiceWriter:
        calls = self._calls

        def id_of_call(number: int) -> str:
            """The same id whoever attaches. Mistral's templates take nine letters and digits."""
            digest = sha256(f"{request_id}.{index}.{number}".encode()).hexdigest()
            return digest[:9] if tool_format == ToolFormat.MISTRAL else f"call_{digest[:24]}"

        return ChatChoiceWriter(
            index,
            None if calls is None else self._reader(calls, tool_format),
            id_of_call,
            None if thinking is None else ThinkingReader(thinking),
            parallel=calls is None or calls.parallel,
            named=calls is not None and bool(calls.name),
            logprobs=self._logprobs,
            token_ids=self._token_ids,
        )

    def _reader(self, calls: Calls, tool_format: str) -> CallReader:
        if not (calls.required and self._held):
            return reader(tool_format, calls.names)
        return NamedReader(calls.name) if calls.name else JsonReader(calls.names)
