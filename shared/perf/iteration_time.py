"""The interface of all profiles: the iteration time of a (GPU, model, tensor parallelism)."""

from typing import Protocol

from shared.perf.shape import BatchShape


class Profile(Protocol):
    """An immutable model, monotone in every sum of the shape, as its inverse needs."""

    @property
    def name(self) -> str: ...

    def batch_s(self, shape: BatchShape) -> float:
        """Seconds of one iteration, the engine's per-iteration overhead included."""

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        """The most tokens (0..limit) of one more chunk, on `cached` tokens, that fit `budget_s`."""


CHUNK_TOKENS = 512


def prefill_token_s(profile: Profile, beside: BatchShape) -> float:
    """Seconds of a prompt token, as in chunks of CHUNK_TOKENS beside these decodes."""
    return profile.batch_s(beside.with_chunk(CHUNK_TOKENS, 0)) / CHUNK_TOKENS
