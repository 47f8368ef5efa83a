"""Makes records of requests that wait in the best-effort pool, for tests."""

from shared.schemas import Record
from tests import made

NOW = 1000.0


def pooled(key: str, **more: object) -> Record:
    """A request of 100 tokens of work that waits for a minute; `key` is `<tenant>.<request>`."""
    values = {"arrived_unix_s": NOW, "begin_by_unix_s": NOW + 60.0, "prompt_tokens": 90, **more}
    return made.record(key, **values)
