"""Reads an HTTP request (headers and body) into an Ask: the GenerateRequests to send to admission,
and all that the form of their answer depends on.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from msgspec.structs import replace

from services.gateway.api.alive import Fleet
from services.gateway.api.api_format import ApiFormat
from services.gateway.api.asking import StreamOptions
from services.gateway.api.chats import WHATEVER_FITS, ChatBody
from services.gateway.api.completions import CompletionBody
from services.gateway.api.tools.definitions import Calls
from services.gateway.http.headers import (
    ALLOW_RELEGATION,
    APPLICATION,
    IDEMPOTENCY_KEY,
    VERDICT,
    read_correlation_id,
    read_flag,
    read_tier,
)
from services.gateway.http.slo_headers import read_slo
from shared.errors import PeerError
from shared.rules.tiers import TierSet
from shared.schemas import GenerateRequest, Sampling

REQUESTS_LIMIT = 64  # per HTTP request: prompts times choices
TOP_K_LIMIT = 1_000_000  # more than any vocabulary has


class Ask(NamedTuple):
    """An answer as asked for: a request per choice, `n` per prompt, by index; they share the rest.
    `service_tier` is echoed while no request has been relegated.
    """

    request_id: str  # of the whole answer; choice 0 has the same
    correlation_id: str  # the client's own; empty: it gave none
    named: bool  # the client named the request, and may come back for it
    requests: list[GenerateRequest]
    n: int
    tier: str
    service_tier: str
    flex: bool
    stream: bool
    include_usage: bool
    usage_so_far: bool  # with every chunk as well
    with_verdicts: bool  # the answer tells of each choice whether its SLO was met
    api_format: ApiFormat
    # asked again under the same id until it has an answer: its stored requests go on
    persistent: bool = False

    @property
    def model(self) -> str | None:
        return self.requests[0].model

    @property
    def tenant(self) -> str:
        return self.requests[0].tenant


def importance_of(priority: int | None) -> float:
    """vLLM's integer priority (higher: more important) as a weight: -1 -> 1/2, 0 -> 1, 1 -> 2."""
    p = priority or 0
    return 1.0 + p if p >= 0 else 1.0 / (1 - p)


def read_ask(
    headers: Mapping[str, str],
    body: CompletionBody | ChatBody,
    request_id: str,
    tenant: str,
    tiers: TierSet,
    fleet: Fleet,
) -> Ask:
    """Reads a whole request. Raises PeerError, naming the field or the header at fault. Checks that
    depend on the model are admission's.
    """
    held = fleet.holds_formats(body.model)
    tier, service_tier = read_tier(headers, body.service_tier, tiers)
    prompts, n = body.prompts, body.n or 1
    if len(prompts) * n > REQUESTS_LIMIT:
        param = "prompt" if len(prompts) > REQUESTS_LIMIT else "n"
        raise PeerError(
            f"{len(prompts)} prompts with {n} choices each are more than {REQUESTS_LIMIT}",
            code="invalid_value",
            param=param,
        )
    options = body.stream_options or StreamOptions()
    slo = read_slo(headers, tiers.named(tier).slo_of(fleet.model_of(body.model)))
    calls = body.calls
    sampling, importance = sampling_of(body, calls, held=held), importance_of(body.priority)
    application, session = headers.get(APPLICATION, "")[:128], body.session
    allow_relegation = read_flag(headers, ALLOW_RELEGATION, True)
    requests = [
        GenerateRequest(
            request_id=id_of_choice(request_id, at * n + choice),
            tenant=tenant,
            model=body.model,
            prompt=prompt.text,
            token_ids=prompt.token_ids,
            messages=prompt.messages,
            tools=[] if calls is None else calls.definitions,
            chat_template_kwargs=body.template,
            sampling=replace(sampling, seed=seed_of_choice(sampling.seed, choice)),
            slo=slo,
            importance=importance,
            application=application,
            session=session,
            choices=len(prompts) * n,
            allow_relegation=allow_relegation,
        )
        for at, prompt in enumerate(prompts)
        for choice in range(n)
    ]
    return Ask(
        request_id=request_id,
        correlation_id=read_correlation_id(headers),
        named=IDEMPOTENCY_KEY in headers,
        requests=requests,
        n=n,
        tier=tier,
        service_tier=service_tier,
        flex=tiers.named(tier).service_tier == "flex",
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        usage_so_far=bool(options.include_usage and options.continuous_usage_stats),
        with_verdicts=read_flag(headers, VERDICT, False),
        api_format=body.api_format(held=held),
    )


def id_of_choice(request_id: str, index: int) -> str:
    """The request id of a choice. Choice 0 keeps the id. For the others a digest of it stands in
    front of their number, so that no client has that id by chance.
    """
    return request_id if index == 0 else f"{sha256(request_id.encode()).hexdigest()[:48]}-{index}"


def seed_of_choice(seed: int | None, choice: int) -> int | None:
    """The seed of choice i of a prompt: seed + i, modulo 2^64, as if only it were asked for."""
    return None if seed is None else (seed + choice + 2**63) % 2**64 - 2**63


def sampling_of(
    body: CompletionBody | ChatBody, calls: Calls | None = None, *, held: bool = True
) -> Sampling:
    """`calls`: the tool calls that the answer may hold. An engine that can (`held`) holds required
    ones to their format. Others are found by their marks, which are special tokens of some models.
    """
    structured, skip = body.structured, body.skip_special_tokens is not False
    if calls is not None:
        if calls.required and structured is not None:
            raise PeerError(
                "tool_choice requires a call, which has a format of its own",
                param="response_format",
            )
        required = calls.structured
        if required is not None and held:
            structured = required
        else:
            skip = False
    stop = body.stop if body.stop is not None else []
    return Sampling(
        max_tokens=min(body.limit or body.default_max_tokens, WHATEVER_FITS),
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=min(max(0, body.top_k or 0), TOP_K_LIMIT),
        seed=body.seed,
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=body.stop_token_ids or [],
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.alternatives,
        min_p=body.min_p or 0.0,
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias or {},
        structured=structured,
        skip_special_tokens=skip,
    )
