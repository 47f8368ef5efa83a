"""Makes records of requests that wait in the best-effort pool, for tests of the pool's order."""

from shared.schemas import Record
from tests import made

NOW = 1000.0


def pooled(key: str, **more: object) -> Record:
    """A request that costs 100 tokens at most, and must begin within a minute of its arrival."""
    values = {"arrived_unix_s": NOW, "begin_by_unix_s": NOW + 60.0, "prompt_tokens": 90, **more}
    return made.record(key, **values)
