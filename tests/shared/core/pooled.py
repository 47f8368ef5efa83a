"""Records of the best-effort pool, for tests."""

from shared.schemas import Record
from shared.vocabulary import RecordState, RequestKey, ServiceClass, Slo

NOW = 1000.0


def pooled(key: str, **more: object) -> Record:
    """A request of 100 tokens of work that waits for a minute; `key` is `<tenant>.<request>`."""
    values: dict[str, object] = {
        "key": RequestKey(key), "body_key": "", "owner": "a", "state": RecordState.ACTIVE,
        "attempt": 0, "tier": "chat", "application": "", "service_class": ServiceClass.STANDARD,
        "slo": Slo(ttft_s=1.0), "importance": 1.0, "session": "", "arrived_unix_s": NOW,
        "expires_unix_s": NOW + 1e6, "begin_by_unix_s": NOW + 60.0, "prompt_tokens": 90,
        "max_tokens": 10, "stream_subject": "",
    }  # fmt: skip
    return Record(**{**values, **more})  # type: ignore[arg-type]
