"""Makes the offer of a request from its record: all that a planner may know of the request."""

import math

from shared.measure import Measure
from shared.schemas import Offer, Record
from shared.vocabulary import ServiceClass


def as_offer(record: Record, service_class: ServiceClass, *, hops_left: int = 0) -> Offer:
    """The offer of a request that nobody holds. `hops_left`: further replicas to be asked."""
    made = record.resume.measure
    measure = made if made.tokens else Measure.begin(record.slo, record.arrived_unix_s)
    return offer_of(
        record, service_class, measure, made.tokens, body_key=record.body_key, hops_left=hops_left
    )


def offer_of(
    record: Record,
    service_class: ServiceClass,
    measure: Measure,
    generated_tokens: int,
    *,
    body_key: str = "",
    hops_left: int = 0,
) -> Offer:
    """The offer of a request whose class, measure and tokens of earlier attempts are those given. A
    worker describes what it holds this way; it has the body already.
    """
    return Offer(
        key=record.key,
        attempt=record.attempt,
        service_class=service_class,
        tier=record.tier,
        slo=record.slo,
        importance=record.importance,
        application=record.application,
        arrived_unix_s=record.arrived_unix_s,
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        generated_tokens=generated_tokens,
        next_due_unix_s=measure.next_due_unix_s,
        expires_unix_s=record.expires_unix_s,
        begin_by_unix_s=record.begin_by_unix_s,
        session=record.session,
        allow_relegation=record.allow_relegation,
        first_token_unix_s=measure.first_unix_s if measure.tokens else math.inf,
        newest_token_unix_s=measure.last_unix_s if measure.tokens else math.inf,
        left=record.left,
        answering=measure.thinking_tokens is not None,
        body_key=body_key,
        needs=record.needs,
        model=record.model,
        weight=record.weight,
        hops_left=hops_left,
        prefix=record.prefix,
        then=record.then,
        kv_at=None if record.kv is None else record.kv.replica,
        kv_tokens=0 if record.kv is None else record.kv.tokens,
    )
