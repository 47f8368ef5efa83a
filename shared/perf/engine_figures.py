"""The figures of an engine bench: its program prints them, and `slackline bench` reads them."""

from msgspec import Struct


class Speed(Struct, frozen=True, kw_only=True):
    """Tokens per second of the engine, of `model.generate` and, where it was tried, of
    `model.generate_batch`.
    """

    name: str
    engine: float
    generate: float
    generate_batch: float | None = None


class EngineFigures(Struct, frozen=True, kw_only=True):
    """`iteration_s` and `outside_s` are by decodes in the batch; `outside_s` is the part outside
    the model's forward pass. `late_s` is how late an event loop wakes beside the engine.
    """

    model: str
    parameters: int
    threads: int
    rounds: int
    speeds: list[Speed]
    iteration_s: dict[int, float]
    outside_s: dict[int, float]
    # beside which work -> (p50, p99); native code shows the cost of a busy core without any lock
    late_s: dict[str, tuple[float, float]]
