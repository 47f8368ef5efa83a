"""Turns a client's request into a record to store: checks, tokens, deadlines. No I/O but the
tokenizer's thread. Nothing takes unbounded time: a message has 8 MiB, a MiB takes at most 1 s of
CPU time to tokenise, rendering ends after RENDER_CPU_S. So a thread is done within 20 s.
"""

import asyncio
import ctypes
import math
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from services.admission.intake import idempotency
from services.admission.intake.reading_turns import HUGE_BYTES, Turns
from services.admission.intake.required_features import Wanted, required_features
from services.admission.tokenizers import Tokenizers, missing
from services.admission.workers import Workers
from shared import subjects
from shared.columns import pack
from shared.core.announced import profile_of
from shared.core.record.record import does_not_fit
from shared.errors import ConfigError, PeerError
from shared.perf.zero_load import CHUNK_TOKENS, in_seconds, tbt_s, ttft_s
from shared.prefix import chain_of, prefix_of, salt_of
from shared.rules.rules import Rules
from shared.rules.tiers import TierSet
from shared.schemas import Announce, Body, GenerateRequest, Record, Sampling, Thinking
from shared.structured import JsonSchema
from shared.text import thinking
from shared.text.tokenizer import Tokenizer, TooManyTokens
from shared.vocabulary import RecordState, RequestKey, ServiceClass, Slo

Prompt = list[int]
T = TypeVar("T")

LOGPROBS_LIMIT = 200_000  # per request: about 4 MB, which a message can carry
# Bytes of a message beyond which reading (1 us each; token ids 16 times as fast) would block.
LONG_BYTES = 4096
IDS_SPEED = 16
LONG_PROMPTS = 2  # read at once: each takes a core, and some 200 times its size of memory
TOKENS_LIMIT = 2**31  # ids, where a model does not tell how many it has
PROMPT_TOKENS_LIMIT = 2_000_000  # 8 MB: more, no message carries to a worker
CACHING = frozenset({"torch", "vllm"})  # engines that may have a prefix of the prompt
# between two checks for a worker that meets the needs, while one may not have been heard of
LISTEN_S = 0.05


def check(request: GenerateRequest, tier: str, tiers: TierSet) -> RequestKey:
    """The request's key. Raises PeerError for every mistake that needs no tokenizer to be found."""
    key = subjects.request_key(request.tenant, request.request_id)
    tiers.named(tier)
    given = _given(request)
    if len(given) != 1:
        raise PeerError(
            f"give exactly one of prompt, messages and token_ids, not {len(given)}", param="prompt"
        )
    if not getattr(request, given[0]):
        raise PeerError(f"{given[0]} is empty", param=given[0])
    for param in ("tools", "chat_template_kwargs"):
        if getattr(request, param) and request.messages is None:
            raise PeerError(f"{param} needs messages", param=param)
    _coherent(request.sampling)
    if request.inbox is not None:
        subjects.check_inbox(request.inbox, request.tenant)
    return key


def _coherent(sampling: Sampling) -> None:
    """Raises PeerError for parameters that contradict each other."""
    if sampling.min_tokens > sampling.max_tokens:
        raise PeerError(
            f"min_tokens {sampling.min_tokens} is more than max_tokens {sampling.max_tokens}",
            param="min_tokens",
        )
    if sampling.structured is not None and sampling.ignore_eos:
        raise PeerError(
            "ignore_eos and structured output exclude each other:"
            " an output that is complete can only end",
            param="ignore_eos",
        )
    if isinstance(sampling.structured, JsonSchema):
        try:
            schema = msgspec.json.decode(sampling.structured.schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise PeerError(f"the schema is not JSON: {error}", param="structured") from None
        if not isinstance(schema, dict | bool):
            raise PeerError("a JSON schema is an object, or true or false", param="structured")


def _given(request: GenerateRequest) -> list[str]:
    """The fields by which the prompt was given."""
    return [
        name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None
    ]


def tokenise(
    request: GenerateRequest, tokenizer: Tokenizer | None, worker: Announce | None
) -> Prompt:
    """The tokens of the prompt. Raises PeerError for token ids outside the vocabulary, messages
    that cannot be rendered, a text that is too long whatever its tokens are, or any text where its
    model's tokenizer is not here (None).
    """
    vocabulary = TOKENS_LIMIT if worker is None else worker.vocabulary or TOKENS_LIMIT
    if tokenizer is not None:
        vocabulary = tokenizer.vocabulary
    for param, tokens in (
        ("logit_bias", request.sampling.logit_bias),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("token_ids", request.token_ids),
    ):
        if tokens and param == "token_ids" and len(tokens) > PROMPT_TOKENS_LIMIT:
            raise PeerError(f"more than {PROMPT_TOKENS_LIMIT} token ids", param=param)
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise PeerError(f"token ids must lie between 0 and {vocabulary - 1}", param=param)
    if request.token_ids is not None:
        return request.token_ids
    if tokenizer is None:
        raise missing("" if worker is None else worker.model)
    rendered = request.messages is not None
    text = (
        tokenizer.render(request.messages, request.tools, request.chat_template_kwargs)
        if rendered
        else request.prompt
    )
    assert text is not None
    if worker is not None and (least := tokenizer.least_tokens(text)) >= worker.context_tokens:
        raise _over_context(request, least, worker, at_least=True)
    most = PROMPT_TOKENS_LIMIT
    if worker is not None:
        most = min(most, worker.context_tokens - 1)
    try:
        return tokenizer.encode(text, rendered=rendered, most=most)
    except TooManyTokens as error:
        if worker is None or error.tokens < worker.context_tokens:
            raise
        raise _over_context(request, error.tokens, worker) from None


def thinking_of(
    request: GenerateRequest, prompt: Prompt, tokenizer: Tokenizer | None
) -> Thinking | None:
    """The marks of thinking in the answer to a chat. None: it has none that its text shows. An
    answer that is held to a format does not think.
    """
    sampling = request.sampling
    if tokenizer is None or request.messages is None or sampling.structured is not None:
        return None
    end = tokenizer.end_of_thinking
    if end is None or thinking.ended(prompt, end):
        return None
    if not tokenizer.shows(end, specials=not sampling.skip_special_tokens):
        return None
    begun = tokenizer.begin_of_thinking in prompt[-thinking.TEMPLATE_END_TOKENS :]
    return Thinking(end=tokenizer.thinking_end, begun=begun)


def _over_context(
    request: GenerateRequest, tokens: int, worker: Announce, *, at_least: bool = False
) -> PeerError:
    message = does_not_fit(tokens, worker.context_tokens, at_least=at_least)
    return PeerError(message, code="context_length_exceeded", param=_given(request)[0])


def fits(prompt: Prompt, request: GenerateRequest, worker: Announce | None) -> int:
    """The most tokens that may be generated. Raises PeerError for what this fleet cannot do."""
    if worker is None:  # none has ever been heard: the sweep checks once one is
        return request.sampling.max_tokens
    room = worker.context_tokens - len(prompt)
    if room < 1:
        raise _over_context(request, len(prompt), worker)
    most = min(request.sampling.max_tokens, room)
    logprobs = most * (1 + (request.sampling.logprobs or 0))
    if request.sampling.logprobs is not None and logprobs > LOGPROBS_LIMIT:
        raise PeerError(
            f"max_tokens and logprobs together may ask for {LOGPROBS_LIMIT} log-probabilities,"
            f" not {logprobs}",
            param="logprobs",
        )
    return most


def resolve(slo: Slo, prompt_tokens: int, max_tokens: int, worker: Announce | None) -> Slo:
    """The SLO in seconds. Raises PeerError for multiples of zero-load time without a profile."""
    if not slo.in_multiples:
        return slo
    if worker is None:
        raise PeerError(
            "an SLO as a multiple of zero-load time needs a running worker", param="slo"
        )
    try:
        profile = profile_of(worker)
    except ConfigError as error:
        raise PeerError(str(error), param="slo") from error
    return in_seconds(slo, profile, prompt_tokens, max_tokens)


def check_attainable(slo: Slo, prompt_tokens: int, worker: Announce | None) -> None:
    """Raises PeerError for an SLO that no replica can hold even when it is idle: for a request that
    may not be served late, waiting would not help. Drafts may keep a pace that iterations cannot,
    and a prefix cache may have most of a prompt.
    """
    if worker is None:
        return
    try:
        profile = profile_of(worker)
    except ConfigError:
        return
    iteration_s = first_s = worker.pace * tbt_s(profile, 1, 1)
    if worker.engine not in CACHING:
        first_s = max(first_s, worker.pace * ttft_s(profile, prompt_tokens, CHUNK_TOKENS))
    if slo.ttft_s is not None and slo.ttft_s < first_s:
        raise PeerError(
            f"earliest first token in {_in_words(first_s)}; you asked for {_in_words(slo.ttft_s)}",
            code="unattainable_slo",
            param="slo.ttft_s",
        )
    pace_s = slo.tightest_pace_s(slo.thinks)
    if not worker.draft and pace_s < iteration_s:
        raise PeerError(
            f"a token takes {_in_words(iteration_s)} at the least; you asked for one each "
            f"{_in_words(pace_s)}",
            code="unattainable_slo",
            param="slo.tbt_s",
        )


def _in_words(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 1.0 else f"{1e3 * seconds:.3g} ms"


class Intake:
    """Reads requests: everything between what a client sent and a record that can be stored."""

    def __init__(
        self,
        rules: Rules,
        tokenizers: Tokenizers,
        workers: Workers,
        body_key: Callable[[RequestKey], str],
        owner: str,
    ) -> None:
        self._rules, self._tokenizers = rules, tokenizers
        self._workers, self._body_key, self._owner = workers, body_key, owner
        self._turns = Turns(LONG_PROMPTS)

    async def look(
        self, request: GenerateRequest, tier: str, payload_bytes: int
    ) -> tuple[RequestKey, bytes]:
        """The key of a request, and the digest of what it asks for. Raises PeerError for every
        mistake that needs no tokenizer to be found. `payload_bytes`: the size of its message.
        """

        def step() -> tuple[RequestKey, bytes]:
            return check(request, tier, self._rules.tiers), idempotency.digest(request, tier)

        return await self._in_time(request, payload_bytes, step)

    async def read(
        self,
        request: GenerateRequest,
        key: RequestKey,
        tier: str,
        *,
        payload_bytes: int,
        digest: bytes,
        arrived_unix_s: float,
        json: bool,
        traceparent: str,
        caller: str,
    ) -> tuple[Record, Body]:
        """The record to store, not yet placed, and its body. Raises PeerError. Waits while a worker
        that was not heard of yet may have what the request needs.
        """
        wanted = await self._wanted(request)
        worker = self._workers.any(wanted.model, wanted.needs) or self._workers.last(wanted.model)
        tokenizer = await self._tokenizers.of(wanted.model, worker)
        tenant = self._rules.tenants.named(request.tenant)
        salt = "" if tenant.shares_prefixes else request.tenant

        def step() -> tuple[Prompt, bytes]:
            prompt = tokenise(request, tokenizer, worker)
            return prompt, prefix_of(chain_of(prompt, salt_of(salt, wanted.adapter)))

        prompt, prefix = await self._in_time(request, payload_bytes, step)
        max_tokens = fits(prompt, request, worker)
        named = self._rules.tiers.named(tier)
        slo = resolve(request.slo or named.slo_of(wanted.model), len(prompt), max_tokens, worker)
        if slo.bounds_nothing:
            bounds = "ttft_s, tbt_s, ttlt_s or task_ttlt_s"
            raise PeerError(f"an SLO must bound something: {bounds}", param="slo")
        if not request.allow_relegation:
            check_attainable(slo, len(prompt), worker)
        most = self._rules.tenants.most_importance(request.tenant, named.importance)
        tenant.check_slo(slo)
        record = Record(
            key=key,
            body_key=self._body_key(key),
            owner=self._owner,
            state=RecordState.ACTIVE,
            attempt=0,
            service_class=ServiceClass.STANDARD,
            tier=tier,
            slo=slo,
            importance=min(request.importance * named.importance, most),
            application=request.application or tier,
            session=request.session,
            arrived_unix_s=arrived_unix_s,
            expires_unix_s=arrived_unix_s + request.expires_s,
            prompt_tokens=len(prompt),
            max_tokens=max_tokens,
            stream_subject=request.inbox or subjects.stream(key),
            json=json,
            allow_relegation=request.allow_relegation,
            traceparent=traceparent,
            caller=caller,
            needs=wanted.needs,
            asked=digest,
            weight=tenant.weight,
            begin_by_unix_s=math.inf if named.wait_s is None else arrived_unix_s + named.wait_s,
            thinking=thinking_of(request, prompt, tokenizer),
            model=wanted.model,
            prefix=prefix,
            salt=salt,
        )
        sampling = replace(
            request.sampling,
            max_tokens=max_tokens,
            min_tokens=min(request.sampling.min_tokens, max_tokens),
        )
        return record, Body(prompt=pack(prompt), sampling=sampling, adapter=wanted.adapter)

    async def _wanted(self, request: GenerateRequest) -> Wanted:
        workers, ours, names = self._workers, self._tokenizers.configured, self._rules.models
        try:
            async with asyncio.timeout(2 * workers.lost_s):
                while (wanted := required_features(request, workers, ours, names)) is None:
                    await asyncio.sleep(LISTEN_S)
                return wanted
        except TimeoutError:
            raise PeerError(
                "it is not known yet whether a replica has what this needs: ask again",
                code="server_is_overloaded",
            ) from None

    async def _in_time(
        self, request: GenerateRequest, payload_bytes: int, step: Callable[[], T]
    ) -> T:
        """The outcome of a step: for a long message beside the loop, in its tenant's turn."""
        size = payload_bytes // (IDS_SPEED if request.token_ids is not None else 1)
        if size < LONG_BYTES:
            return step()
        weight = self._rules.tenants.named(request.tenant).weight
        async with self._turns.turn(request.tenant, weight, size):
            outcome = await asyncio.to_thread(step)
            if size >= HUGE_BYTES:  # the allocator would keep most of what the tokenizer took
                await asyncio.to_thread(_give_back)
            return outcome


def _give_back() -> None:
    """Return freed memory to the system, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
