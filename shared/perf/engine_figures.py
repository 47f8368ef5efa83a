"""What the bench of an engine measured, as the program that runs it prints it and `slackline bench`
reads it.
"""

from msgspec import Struct


class Speed(Struct, frozen=True, kw_only=True):
    """Tokens a second of the engine, of `model.generate` and, where it was tried, of
    `model.generate_batch`.
    """

    name: str
    engine: float
    generate: float
    generate_batch: float | None = None


class EngineFigures(Struct, frozen=True, kw_only=True):
    """`outside_s`: of an iteration of so many decodes, what is not the model's forward pass.
    `late_s`: of an event loop's naps.
    """

    model: str
    parameters: int
    threads: int
    rounds: int
    speeds: list[Speed]
    iteration_s: dict[int, float]
    outside_s: dict[int, float]
    # beside what -> p50, p99; native code shows what a busy core costs without any lock
    late_s: dict[str, tuple[float, float]]
