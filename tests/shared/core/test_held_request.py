"""A request as its worker holds it."""

from msgspec.structs import replace

from shared.columns import pack
from shared.core.held_request import HeldRequest
from shared.schemas import Body, Record, Sampling
from shared.vocabulary import FinishReason, RecordState, RequestKey, ServiceClass, Slo

RECORD = Record(
    key=RequestKey("t.q"), body_key="b", owner="a", state=RecordState.ACTIVE, attempt=1,
    service_class=ServiceClass.STANDARD, tier="chat", slo=Slo(ttft_s=1.0), importance=1.0,
    application="", session="", arrived_unix_s=0.0, expires_unix_s=1e6,
    prompt_tokens=4, max_tokens=40, stream_subject="s",
)  # fmt: skip


def test_it_ends_where_its_record_says_if_that_is_before_what_was_asked_for() -> None:
    """Admission cuts an answer to the fleet's longest context. A replica with a longer one came
    later, and held the request for ever: its planner counts to the record's end.
    """
    body = Body(prompt=pack([1, 2, 3, 4]), sampling=Sampling(max_tokens=40))
    for most in (40, 7):
        record = replace(RECORD, max_tokens=most)
        held = HeldRequest.begin(0, record, body, eos_token_ids=frozenset(), end_of_thinking=None)
        work = held.work(4, 0, context_tokens=4096)
        assert (work.limit, work.limit_reason) == (most, FinishReason.LENGTH)
