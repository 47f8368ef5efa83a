"""The traffic of a simulation: the requests that will arrive, and their records as admission would
store them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.virtual_fleet import ADMISSION
from shared.errors import ConfigError
from shared.perf.iteration_time import Profile
from shared.perf.zero_load import in_seconds
from shared.rules.tiers import TierSet
from shared.schemas import Body, Record, Sampling
from shared.vocabulary import RecordState, RequestKey, ServiceClass, Slo

EXPIRES_S = 172_800.0  # longest a request may stay unfinished: the default of GenerateRequest
# max_tokens is the longest output rounded up to this, the same for all requests: so it reveals no
# request's length
OUTPUT_STEP_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests in order of arrival, and the tiers that they name. A request that is `after` another
    arrives when that one has ended well and its pause is over. The seed decides the routers' draws.
    """

    requests: Sequence[PlannedRequest]
    tiers: TierSet
    seed: int = 1

    @property
    def begin_s(self) -> float:
        return self.requests[0].arrival_s if self.requests else 0.0

    @property
    def most_tokens(self) -> int:
        """The `max_tokens` of every request."""
        longest = max((request.output_tokens for request in self.requests), default=1)
        return -(-longest // OUTPUT_STEP_TOKENS) * OUTPUT_STEP_TOKENS

    def slo(self, request: PlannedRequest) -> Slo:
        """The SLO of its tier; multiples of zero-load times are not resolved yet."""
        return self.tiers.named(request.tier).slo_of(request.model)


def key_of(planned: PlannedRequest) -> RequestKey:
    return RequestKey(f"{planned.tenant}.{planned.number}")


def stored_as(
    planned: PlannedRequest,
    tiers: TierSet,
    profile: Profile,
    context_tokens: int,
    most_tokens: int,
    now_unix_s: float,
    *,
    model: str = "",
) -> tuple[Record, Body]:
    """The record as admission would store it, without a place yet; and a body without its prompt,
    which a simulation never reads. `model`: the only one whose replicas may hold it.

    Raises ConfigError for a request that no replica can hold.
    """
    room = context_tokens - planned.prompt_tokens
    if room < 1 or planned.prompt_tokens < 1:
        raise ConfigError(
            f"request {planned.number} has a prompt of {planned.prompt_tokens} tokens; "
            f"a replica holds {context_tokens}"
        )
    max_tokens, tier = min(most_tokens, room), tiers.named(planned.tier)
    record = Record(
        key=key_of(planned),
        body_key="",
        owner=ADMISSION,
        state=RecordState.ACTIVE,
        attempt=0,
        service_class=ServiceClass.STANDARD,
        tier=planned.tier,
        slo=in_seconds(tier.slo_of(planned.model), profile, planned.prompt_tokens, max_tokens),
        importance=planned.importance * tier.importance,
        application=planned.application or planned.tier,
        session=planned.session,
        arrived_unix_s=now_unix_s,
        expires_unix_s=now_unix_s + EXPIRES_S,
        prompt_tokens=planned.prompt_tokens,
        max_tokens=max_tokens,
        stream_subject="",
        model=model,
    )
    sampling = Sampling(
        max_tokens=max_tokens,
        output_tokens=planned.output_tokens,
        thinking_tokens=planned.thinking_tokens,
        ignore_eos=True,
        temperature=0.0,
    )
    return record, Body(prompt=b"", sampling=sampling)
