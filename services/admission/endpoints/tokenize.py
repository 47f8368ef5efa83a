"""Answers clients which tokens a text has, or which text tokens have, as admission counts them for
their model.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from services.admission.intake.reading_turns import Turns
from services.admission.intake.required_features import chosen_model
from services.admission.tokenizers import Tokenizers, missing
from services.admission.workers import Workers
from shared.bus.api import Call
from shared.core.shared_room import Shares
from shared.errors import PeerError
from shared.rules.rules import Rules
from shared.schemas import Detokenize, Detokenized, Refused, Tokenize, Tokenized
from shared.text.tokenizer import Tokenizer

T = TypeVar("T")

TOKENS_LIMIT = 1_000_000  # of one answer: 5 MB, which a message can carry
NAMES_LIMIT = 100_000  # names of tokens have any length
LARGE_BYTES = 4096  # beyond, the work (1 us a byte) would hold up the event loop
LARGE_AT_ONCE = 2  # each takes a core; one at most is huge
# Of questions under way, as sent. Tenants share them, and each question counts at least
# SMALLEST_BYTES: 64 at most, or three times as many from ten tenants. A client asks again.
WAITING_BYTES, SMALLEST_BYTES = 32 * 1024 * 1024, 512 * 1024


class TokenizeEndpoint:
    """Questions of clients about tokens. They are answered beside requests, and after them."""

    def __init__(self, tokenizers: Tokenizers, workers: Workers, rules: Rules) -> None:
        self._tokenizers, self._workers, self._rules = tokenizers, workers, rules
        self._turns = Turns(LARGE_AT_ONCE)
        self._waiting = Shares(WAITING_BYTES)

    async def answer(self, question: Tokenize | Detokenize, call: Call) -> None:
        tenant = call.subject.rpartition(".")[2]
        size = max(call.payload_bytes, SMALLEST_BYTES)
        if not self._waiting.fits(tenant, 1.0, size):
            message = "too many questions about tokens are waiting"
            await call.reply(Refused(code="slow_down", message=message, retry_after_s=1.0))
            return
        self._waiting.take(tenant, 1.0, size)
        try:
            step = partial(self._read, question, await self._tokenizer(question.model))
            await call.reply(await self._in_time(tenant, call.payload_bytes, step))
        except PeerError as error:
            refused = Refused(code=error.code, message=error.message, param=error.param)
            await call.reply(refused)
        finally:
            self._waiting.give(tenant, size)

    async def _tokenizer(self, model: str) -> Tokenizer:
        """The tokenizer of the model that a question names, or would have. Raises PeerError."""
        workers, ours = self._workers, self._tokenizers.configured
        chosen = chosen_model(model or None, "", workers, ours, self._rules.models)
        if chosen is None:
            raise PeerError("its replicas were not heard yet", code="server_is_overloaded")
        worker = workers.any(chosen[0]) or workers.last(chosen[0])
        tokenizer = await self._tokenizers.of(chosen[0], worker)
        if tokenizer is None:
            raise missing(chosen[0])
        return tokenizer

    def _read(
        self, question: Tokenize | Detokenize, tokenizer: Tokenizer
    ) -> Tokenized | Detokenized:
        if isinstance(question, Detokenize):
            return _text_of(question, tokenizer)
        tokens = _tokens_of(question, tokenizer)
        if question.names and len(tokens) > NAMES_LIMIT:
            raise PeerError(
                f"the names of more than {NAMES_LIMIT} tokens are not told",
                param="return_token_strs",
            )
        names = [tokenizer.name(token) for token in tokens] if question.names else []
        return Tokenized(tokens=tokens, names=names)

    async def _in_time(self, tenant: str, size: int, step: Callable[[], T]) -> T:
        if size < LARGE_BYTES:
            return step()
        async with self._turns.turn(tenant, 1.0, size):
            return await asyncio.to_thread(step)


def _tokens_of(question: Tokenize, tokenizer: Tokenizer) -> list[int]:
    if (question.prompt is None) == (question.messages is None):
        raise PeerError("give either prompt or messages", param="prompt")
    if question.prompt is not None:
        if question.tools or question.chat_template_kwargs:
            raise PeerError("tools and chat_template_kwargs need messages", param="messages")
        bare = not question.add_special_tokens
        return tokenizer.encode(question.prompt, rendered=bare, most=TOKENS_LIMIT)
    rendered = tokenizer.render(question.messages, question.tools, question.chat_template_kwargs)
    return tokenizer.encode(rendered, rendered=True, most=TOKENS_LIMIT)


def _text_of(question: Detokenize, tokenizer: Tokenizer) -> Detokenized:
    highest = max(question.tokens, default=0)
    if highest >= tokenizer.vocabulary:
        raise PeerError(
            f"token ids must lie between 0 and {tokenizer.vocabulary - 1}", param="tokens"
        )
    return Detokenized(text=tokenizer.decode(question.tokens))
