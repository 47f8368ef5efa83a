"""The figures of an engine bench: its program prints them, and `slackline bench` reads them."""

from msgspec import Struct

from shared.perf.draft import DraftCost

CPU = "cpu"  # the device where it is no GPU


class Speed(Struct, frozen=True, kw_only=True):
    """Tokens per second of the engine, of `model.generate` and, where it was tried, of
    `model.generate_batch`.
    """

    name: str
    engine: float
    generate: float
    generate_batch: float | None = None


class DraftSpeed(Struct, frozen=True, kw_only=True):
    """One batch of decodes, all of which draft; `budget` drafts are verified together. `yielded`
    tokens of a request and iteration. Of an iteration, `drafted_s` passes before the target's pass,
    and `outside_s` outside both models. On a CPU all seconds are of CPU time.
    """

    batch: int
    budget: int
    tokens_per_s: float
    yielded: float
    iteration_s: float
    drafted_s: float
    outside_s: float


class EngineFigures(Struct, frozen=True, kw_only=True):
    """`iteration_s` and `outside_s` are by decodes in the batch; `outside_s` is the part outside
    the model's forward pass. `late_s` is how late an event loop wakes beside the engine.
    """

    model: str
    parameters: int
    device: str  # CPU, or the name of the GPU
    threads: int
    rounds: int
    speeds: list[Speed]
    iteration_s: dict[int, float]
    outside_s: dict[int, float]
    # beside which work -> (p50, p99); native code shows the cost of a busy core without any lock
    late_s: dict[str, tuple[float, float]]
    # of the draft model, as a worker measures and announces it; 0: there is none
    draft: DraftCost = 0.0
    # empty without a draft model
    drafting: list[DraftSpeed] = []
    # tokens per second (on a CPU, of CPU time), one request at a time: transformers' generate, and
    # with the draft model as its assistant
    generate_alone: float = 0.0
    generate_assisted: float = 0.0
