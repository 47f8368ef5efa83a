"""Answers what the tokens of a text are, and the text of tokens: with the tokenizer and the
template that requests are read with.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.bus.api import Call
from shared.errors import PeerError
from shared.schemas import Detokenize, Detokenized, Refused, Tokenize, Tokenized
from shared.text.tokenizer import Tokenizer

T = TypeVar("T")

TOKENS_LIMIT = 1_000_000  # of one answer: 5 MB, which a message can carry
NAMES_LIMIT = 100_000  # names of tokens have any length
LARGE_BYTES = 16 * 1024  # beyond, the work (1 us a character) would hold up the event loop
LARGE_AT_ONCE = 1  # each takes a core
# questions waiting; each may have 8 MiB. A client asks again.
WAITING_LIMIT, WAITING_BYTES = 64, 32 * 1024 * 1024


class TokenDesk:
    """Questions of clients about tokens. They are answered beside requests, and after them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._waiting = self._waiting_bytes = 0

    async def answer(self, question: Tokenize | Detokenize, call: Call) -> None:
        size = call.payload_bytes
        full = self._waiting and self._waiting_bytes + size > WAITING_BYTES
        if full or self._waiting >= WAITING_LIMIT:
            message = "too many questions about tokens are waiting"
            await call.reply(Refused(code="slow_down", message=message, retry_after_s=1.0))
            return
        self._waiting += 1
        self._waiting_bytes += size
        try:
            await call.reply(await self._in_time(size, lambda: self._read(question)))
        except PeerError as error:
            refused = Refused(code=error.code, message=error.message, param=error.param)
            await call.reply(refused)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size

    def _read(self, question: Tokenize | Detokenize) -> Tokenized | Detokenized:
        if isinstance(question, Detokenize):
            return self._text_of(question)
        tokens = self._tokens_of(question)
        if len(tokens) > TOKENS_LIMIT:
            raise PeerError(f"more than {TOKENS_LIMIT} tokens are not told", param="prompt")
        if question.names and len(tokens) > NAMES_LIMIT:
            raise PeerError(
                f"the names of more than {NAMES_LIMIT} tokens are not told",
                param="return_token_strs",
            )
        names = [self._tokenizer.name(token) for token in tokens] if question.names else []
        return Tokenized(tokens=tokens, names=names)

    def _tokens_of(self, question: Tokenize) -> list[int]:
        if (question.prompt is None) == (question.messages is None):
            raise PeerError("give either prompt or messages", param="prompt")
        if question.prompt is not None:
            if question.tools or question.chat_template_kwargs:
                raise PeerError("tools and chat_template_kwargs need messages", param="messages")
            bare = not question.add_special_tokens
            return self._tokenizer.encode(question.prompt, rendered=bare)
        rendered = self._tokenizer.render(
            question.messages, question.tools, question.chat_template_kwargs
        )
        return self._tokenizer.encode(rendered, rendered=True)

    def _text_of(self, question: Detokenize) -> Detokenized:
        highest = max(question.tokens, default=0)
        if highest >= self._tokenizer.vocabulary:
            raise PeerError(
                f"token ids must lie between 0 and {self._tokenizer.vocabulary - 1}",
                param="tokens",
            )
        return Detokenized(text=self._tokenizer.decode(question.tokens))

    async def _in_time(self, size: int, step: Callable[[], T]) -> T:
        if size < LARGE_BYTES:
            return step()
        async with self._large:
            return await asyncio.to_thread(step)
