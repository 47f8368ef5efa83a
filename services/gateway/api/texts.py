"""POST /tokenize and /detokenize, as vLLM has them, and the count of Anthropic's messages.
Admission answers, with its tokenizer of the model.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from services.gateway.api import asking
from services.gateway.api.alive import Fleet
from services.gateway.api.asking import ShortString
from services.gateway.api.chats import ChatBody
from services.gateway.api.tools.definitions import Tools
from services.gateway.http import envelope
from services.gateway.http.envelope import Rejected
from services.gateway.http.json_bytes import encode
from services.gateway.http.request import HttpRequest
from shared import subjects
from shared.bus.api import Bus
from shared.schemas import Detokenize, Detokenized, TokenId, Tokenize, Tokenized

ANSWER_S = 10.0  # a prompt of 8 MB takes two; others may come first


class TokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt, or the messages of a chat."""

    model: ShortString | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None  # of a prompt: true without it
    add_generation_prompt: bool | None = None  # taken with its usual value, true
    return_token_strs: bool | None = None


class TokenizeReply(Struct, frozen=True, kw_only=True):
    """`max_model_len` is null where no replica tells its context."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class CountReply(Struct, frozen=True, kw_only=True):
    input_tokens: int


class DetokenizeBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]
    model: ShortString | None = None


class DetokenizeReply(Struct, frozen=True, kw_only=True):
    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class Texts:
    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus, self._fleet = bus, fleet

    async def tokenize(self, http_request: HttpRequest) -> None:
        neutral = {"add_generation_prompt": (None, True)}
        body = asking.read(_TOKENIZE, await http_request.read(), neutral)
        self._check(body.model)
        question = Tokenize(
            model=self._named(body.model),
            prompt=body.prompt,
            messages=body.messages,
            tools=[msgspec.to_builtins(tool) for tool in body.tools or []],
            chat_template_kwargs=body.chat_template_kwargs or {},
            add_special_tokens=body.add_special_tokens is not False,
            names=bool(body.return_token_strs),
        )
        told = await self._tokenized(http_request, question)
        reply = TokenizeReply(
            count=len(told.tokens),
            max_model_len=self._fleet.context_tokens(body.model) or None,
            tokens=told.tokens,
            token_strs=told.names if body.return_token_strs else None,
        )
        await http_request.answer(encode(reply))

    async def count(self, http_request: HttpRequest, body: ChatBody) -> None:
        """Answers how many tokens a chat has, as Anthropic's API does."""
        self._check(body.model)
        question = Tokenize(
            model=self._named(body.model),
            messages=body.messages,
            tools=[] if body.calls is None else body.calls.definitions,
            chat_template_kwargs=body.template,
        )
        told = await self._tokenized(http_request, question)
        await http_request.answer(encode(CountReply(input_tokens=len(told.tokens))))

    async def detokenize(self, http_request: HttpRequest) -> None:
        body = asking.read(_DETOKENIZE, await http_request.read(), {})
        self._check(body.model)
        told = await self._bus.request(
            subjects.tokens(http_request.tenant),
            Detokenize(model=self._named(body.model), tokens=body.tokens),
            Detokenized,
            timeout_s=ANSWER_S,
        )
        await http_request.answer(encode(DetokenizeReply(prompt=told.text)))

    async def _tokenized(self, http_request: HttpRequest, question: Tokenize) -> Tokenized:
        subject = subjects.tokens(http_request.tenant)
        return await self._bus.request(subject, question, Tokenized, timeout_s=ANSWER_S)

    def _named(self, model: str | None) -> str:
        """The model of a question; empty: the only one there is."""
        return (model or "") if self._fleet.several else ""

    def _check(self, model: str | None) -> None:
        """Raises Rejected for a model that no replica has."""
        if model is not None and not self._fleet.knows(model):
            raise Rejected(envelope.no_such_model(model, self._fleet.names()))
