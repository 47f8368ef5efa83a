"""The iteration-time model of one (GPU, model, tensor parallelism): one pure interface, several
forms.
"""

from typing import Protocol

from shared.perf.shape import BatchShape


class Profile(Protocol):
    """An immutable model. It is monotone in every sum of the shape; otherwise its inverse is not
    defined.
    """

    @property
    def name(self) -> str: ...

    def batch_s(self, shape: BatchShape) -> float:
        """Seconds of one iteration, the engine's per-iteration overhead included."""

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        """The most tokens (0..limit) of one more chunk on `cached` tokens with which the iteration
        fits `budget_s`.
        """
