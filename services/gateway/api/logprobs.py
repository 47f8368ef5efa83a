"""Writes log-probabilities as OpenAI's two APIs do, and tokens within a character as bytes."""

import codecs
from collections.abc import Sequence

from msgspec import Struct

from shared.schemas import Likelihood, TokenLogprob

LEAST = -9999.0  # the least value written, as OpenAI documents; JSON has no infinity


class TopLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """One entry for each token."""

    content: list[ContentLogprob]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """Four columns along the tokens. `top_logprobs` always holds the drawn token, likely or not."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


def written(piece: bytes) -> str:
    """The text of a token, or `bytes:\\xe2\\x80` for parts of characters, which else look alike."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def of_chat(known: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(content=[_content(one.chosen, one.top) for one in known])


def _content(chosen: Likelihood, top: Sequence[Likelihood]) -> ContentLogprob:
    others = [
        TopLogprob(
            token=written(one.piece), logprob=_finite(one.logprob), bytes=list(one.piece) or None
        )
        for one in top
    ]
    return ContentLogprob(
        token=written(chosen.piece),
        logprob=_finite(chosen.logprob),
        bytes=list(chosen.piece) or None,
        top_logprobs=others,
    )


class CompletionColumns:
    """Writes an output, part after part. An offset counts the whole characters before."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of(self, known: Sequence[TokenLogprob], alternatives: int) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[written(one.chosen.piece) for one in known],
            token_logprobs=[_finite(one.chosen.logprob) for one in known],
            top_logprobs=[_named(one) for one in known] if alternatives else None,
            text_offset=[self._pass(one.chosen.piece) for one in known],
        )

    def _pass(self, piece: bytes) -> int:
        """The offset at which this token begins."""
        begins = self._offset
        self._offset += len(self._decoder.decode(piece))
        return begins


def _named(one: TokenLogprob) -> dict[str, float]:
    return {written(likely.piece): _finite(likely.logprob) for likely in (*one.top, one.chosen)}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
