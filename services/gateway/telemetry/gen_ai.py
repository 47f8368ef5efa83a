"""Records a gateway's metrics of generative AI (GenAI), if metering.py chooses so."""

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
    """The metrics of one process. This class drops them; its subclass `Meter` exports them."""

    def record(self, operation: Operation) -> None:
        pass

    def close(self) -> None:
        """Send the metrics not sent yet; blocks for a few seconds at most."""
