"""Makes timings of a made-up engine, and a profile that is fitted to them, for tests."""

import math
import random

from shared.perf.fitting import Timed, fit
from shared.perf.forms import Attention, PiecewiseTokens
from shared.perf.profile_file import ProfileFile
from shared.perf.shape import BatchShape

TRUE = PiecewiseTokens(
    tile=1,
    knots=(0, 32),
    slopes=(2e-5, 3e-5),
    c=0.003,
    attention=Attention(e=0.001, p1=8e-8, p2=6e-8, d0=0.0005, d1=0.0003, d2=1.5e-6),
)


def drawn(rng: random.Random, n: int) -> list[BatchShape]:
    """Batches of all three regimes, of every size."""
    shapes = []
    for i in range(n):
        decodes = 0 if i % 3 == 0 else rng.choice((1, 3, 10, 32))
        shape = BatchShape(decodes=decodes, decode_context=decodes * rng.randint(1, 1500))
        for _ in range(0 if i % 3 == 1 else rng.randint(1, 3)):
            shape = shape.with_chunk(round(math.exp(rng.uniform(0, 6.5))), rng.randint(0, 1000))
        shapes.append(shape)
    return shapes


def timed(
    shapes: list[BatchShape], noise: float, rng: random.Random, stalls: float = 0.0
) -> list[Timed]:
    profile = TRUE.profile("true", 0.0)
    timings = []
    for shape in shapes:
        times = rng.uniform(1 - noise, 1 + noise) * (10 if rng.random() < stalls else 1)
        timings.append(Timed(shape, times * profile.batch_s(shape)))
    return timings


def file_of(timings: list[Timed]) -> ProfileFile:
    return fit(
        timings, name="mine", gpu="cpu", model="m", kv_capacity_tokens=100, provenance="test"
    )


FITTED = file_of(timed(drawn(random.Random(11), 200), 0.05, random.Random(12)))
