"""OpenAI's completions on the wire: the request of POST /v1/completions and its answer."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.api import asking
from services.gateway.api.api_format import Frame, Head, Output, ReplyFrame
from services.gateway.api.asking import Alternatives, AskBody, Prompt
from services.gateway.api.logprobs import CompletionColumns, CompletionLogprobs
from shared.errors import PeerError
from shared.schemas import Delta, Thinking, TokenId, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # as OpenAI documents for completions


class CompletionBody(AskBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt, or several of one kind. `best_of` must equal `n`: all choices are returned."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list. Raises PeerError for an empty or a mixed list."""
        given = self.prompt
        if isinstance(given, str):
            return [Prompt(text=given)]
        texts = [one for one in given if isinstance(one, str)]
        tokens = [one for one in given if isinstance(one, int)]
        lists = [one for one in given if isinstance(one, list)]
        if not given or len(given) not in (len(texts), len(tokens), len(lists)):
            raise PeerError(
                "prompt must be a string, a list of strings, a list of tokens or a list of "
                "such lists",
                param="prompt",
            )
        if tokens:
            return [Prompt(token_ids=tokens)]
        return [Prompt(text=text) for text in texts] or [Prompt(token_ids=one) for one in lists]

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def api_format(self, *, held: bool) -> "CompletionFormat":
        echoes = (
            [prompt.text or "" for prompt in self.prompts for _ in range(self.n or 1)]
            if self.echo
            else []
        )
        return CompletionFormat(echoes, self.logprobs, token_ids=bool(self.return_token_ids))


_BODY = msgspec.json.Decoder(CompletionBody)
# fields that are not served, and the values that ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": (None, "")}


IGNORABLE: dict[str, tuple[Any, ...]] = {"best_of": (None, 1)}  # all `n` answers come


def read_body(raw: bytes) -> CompletionBody:
    """Raises PeerError, naming the field where there is one."""
    body = asking.read(_BODY, raw, _NEUTRAL)
    if body.best_of not in (None, body.n or 1):
        raise PeerError(
            "best_of is not supported, except as n", code="unsupported_parameter", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise PeerError(
            "echo with logprobs is not supported: prompts have none",
            code="unsupported_parameter",
            param="echo",
        )
    if body.echo and any(prompt.text is None for prompt in body.prompts):
        raise PeerError(
            "echo of a prompt given as tokens is not supported",
            code="unsupported_parameter",
            param="echo",
        )
    return body


class CompletionChoice(Struct, frozen=True, kw_only=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoiceWriter:
    """Writes one choice of a completion, which begins with `echo`."""

    def __init__(self, index: int, echo: str, alternatives: int | None, *, token_ids: bool) -> None:
        self._index = index
        self._echo = echo  # not written yet
        self._alternatives = alternatives
        self._token_ids = token_ids
        self._columns = CompletionColumns()

    def whole(self, output: Output, finish_reason: str) -> CompletionChoice:
        return self._choice(output.text, output.tokens, output.logprobs, finish_reason)

    def open(self) -> Sequence[CompletionChoice]:
        return ()

    def say(self, delta: Delta) -> Sequence[CompletionChoice]:
        choice = self._choice(delta.text, delta.tokens, delta.logprobs, None)
        return (choice,) if choice.text or choice.logprobs or choice.token_ids else ()

    def close(self, finish_reason: str) -> Sequence[CompletionChoice]:
        return (self._choice("", [], [], finish_reason),)

    def _choice(
        self,
        text: str,
        tokens: list[int],
        logprobs: Sequence[TokenLogprob],
        finish_reason: str | None,
    ) -> CompletionChoice:
        echo, self._echo = self._echo, ""
        return CompletionChoice(
            text=echo + text,
            index=self._index,
            logprobs=self._columns.of(logprobs, self._alternatives)
            if logprobs and self._alternatives is not None
            else None,
            finish_reason=finish_reason,
            token_ids=tokens if self._token_ids else UNSET,
        )


class CompletionFormat:
    """The completions API. Implements ApiFormat (api_format.py). Choices begin with `echoes`."""

    operation = "text_completion"

    def __init__(self, echoes: Sequence[str], alternatives: int | None, *, token_ids: bool) -> None:
        self._echoes = echoes
        self._alternatives = alternatives
        self._token_ids = token_ids

    def frame(self, head: Head) -> Frame:
        return ReplyFrame(head, "cmpl", "text_completion", "text_completion")

    def writer(
        self, index: int, request_id: str, tool_format: str, thinking: Thinking | None
    ) -> CompletionChoiceWriter:
        echo = self._echoes[index] if self._echoes else ""
        return CompletionChoiceWriter(index, echo, self._alternatives, token_ids=self._token_ids)
