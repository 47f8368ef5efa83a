"""The types of OpenTelemetry's GenAI metrics. metering.py decides whether a process has them."""

from collections.abc import Sequence
from typing import NamedTuple


class Operation(NamedTuple):
    """One call of the API. `choices`: TTFT and mean time per further token of each, where known."""

    name: str  # chat, text_completion
    model: str
    duration_s: float
    error_type: str  # empty: it went well
    choices: Sequence[tuple[float | None, float | None]]


class GenAi:
    """The meter of one process. This one does nothing."""

    def record(self, operation: Operation) -> None:
        pass

    def close(self) -> None:
        """Send what is left; blocks for a few seconds at most."""
