"""The iteration-time model of one (GPU, model, tensor-parallel): one pure interface, several
forms.
"""

from typing import Protocol

from shared.perf.shape import BatchShape


class Profile(Protocol):
    """Immutable. Monotone in every sum of the shape, or its inverse is not defined."""

    @property
    def name(self) -> str: ...

    def batch_s(self, shape: BatchShape) -> float:
        """Seconds one iteration takes, the per-iteration overhead of the engine included."""

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        """The most tokens (0..limit) of one more chunk standing on `cached` tokens with which the
        iteration fits `budget_s`.
        """
