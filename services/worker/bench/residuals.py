"""The errors of predictions on a machine that other processes load.

    python -m services.worker.bench.residuals --model FOLDER [--json FILE]

An engine is profiled as a worker does it, then runs a mix of iterations while the correction
follows: in peace, beside processes that burn CPU, and in peace again. The errors reported:

residual      |measured - predicted| / measured of single iterations, smoothed as the exported
              metric is
single        the same, not smoothed
with margin   the same, of the prediction that policies get, which leans up
in hindsight  the same, for the best constant over the 20 iterations before and after each: the
              error that no ratio known in time could remove
together      |measured - predicted| / measured of 20 iterations in a row as a whole: the error that
              is left where single iterations only scatter
"""

import argparse
import contextlib
import json
import multiprocessing
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from services.worker.config import WorkerConfig
from services.worker.engine import Engine
from services.worker.engines.make import make
from services.worker.profiling import fit_engine
from shared.core.worker.step import Load, Work
from shared.perf import profile_file as store
from shared.perf.iteration_time import Profile
from shared.perf.online import Corrected, Regime
from shared.perf.shape import BatchShape
from shared.schemas import Sampling
from shared.vocabulary import Slot

WINDOW = 20  # iterations on each side of one
CHUNK_TOKENS = 256  # of prefill in one iteration
RUNNING = 16  # requests at once, at most
# probability per iteration: with the lengths below, about as many iterations are mixed as
# decode-only
ARRIVALS = 0.22
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 600), (8, 90)
SETTLE_S = 1.0  # after a change of the load; the phase is settled after that


class Ran(NamedTuple):
    at_s: float  # since the beginning
    shape: BatchShape
    exec_s: float


class Judged(NamedTuple):
    """The errors of one iteration, relative to its measured time."""

    at_s: float
    regime: Regime
    off: float  # |measured - predicted|, the correction as it was before
    leaning: float  # the same of the prediction with its margin
    residual: float  # `off`, smoothed as the metric is
    hindsight: float  # |measured - base * the best constant for the iterations around it|
    together: float  # of the last WINDOW iterations as a whole


@dataclass(slots=True)
class _Request:
    slot: Slot
    prompt: int
    left: int  # tokens to generate
    computed: int = 0
    known: int = 0


class Mix:
    """Requests come, are prefilled in chunks beside the decodes of the others, and go; the same
    sequence for the same seed.
    """

    def __init__(self, engine: Engine, rng: Random) -> None:
        self._engine, self._rng = engine, rng
        self._running: list[_Request] = []
        self._slots = [Slot(n) for n in range(RUNNING)]
        self._waiting = deque[tuple[int, int]]()

    def iteration(self) -> tuple[BatchShape, float]:
        rng, engine = self._rng, self._engine
        if rng.random() < ARRIVALS and len(self._waiting) < RUNNING:
            self._waiting.append((_between(rng, PROMPT_TOKENS), _between(rng, OUTPUT_TOKENS)))
        while self._slots and (self._waiting or not self._running):
            prompt, output = (
                self._waiting.popleft()
                if self._waiting
                else (_between(rng, PROMPT_TOKENS), _between(rng, OUTPUT_TOKENS))
            )
            request = _Request(self._slots.pop(), prompt, output, known=prompt)
            tokens = [rng.randrange(engine.facts.vocabulary) for _ in range(prompt)]
            engine.load(
                Load(
                    request.slot,
                    tokens,
                    0,
                    Sampling(temperature=rng.choice((0.0, 0.8))),
                    rng.getrandbits(32),
                )
            )
            self._running.append(request)
        shape, work, room = BatchShape(), list[Work](), CHUNK_TOKENS
        for request in self._running:
            new = 1
            if request.computed >= request.prompt:
                shape = shape._replace(
                    decodes=shape.decodes + 1,
                    decode_context=shape.decode_context + request.computed,
                )
            elif room:
                new = min(room, request.prompt - request.computed)
                room -= new
                shape = shape.with_chunk(new, request.computed)
            else:
                continue
            work.append(Work(request.slot, new, request.computed + new == request.known))
        exec_s = engine.execute(work, None).exec_s
        took = {entry.slot: entry for entry in work}
        for request in [r for r in self._running if r.slot in took]:
            request.computed += took[request.slot].tokens
            if took[request.slot].emits:
                request.known += 1
                request.left -= 1
            if not request.left:
                engine.release(request.slot)
                self._running.remove(request)
                self._slots.append(request.slot)
        return shape, exec_s


def _between(rng: Random, bounds: tuple[int, int]) -> int:
    return round(float(np.exp(rng.uniform(*np.log(bounds)))))


def _burn() -> None:
    while True:
        pass


@contextlib.contextmanager
def burning(processes: int) -> Iterator[None]:
    """Runs `processes` beside the block, each taking all that it can get of a core."""
    spawn = multiprocessing.get_context("spawn")
    burners = [spawn.Process(target=_burn, daemon=True) for _ in range(processes)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def record(mix: Mix, phases: Sequence[tuple[int, float]]) -> list[Ran]:
    """Run iterations through (burners, seconds), one phase after the other."""
    ran, began_s = list[Ran](), time.monotonic()
    until_s = began_s
    for burners, seconds in phases:
        until_s += seconds
        with burning(burners):
            while (now_s := time.monotonic()) < until_s:
                ran.append(Ran(now_s - began_s, *mix.iteration()))
    return ran


def judge(base: Profile, ran: Sequence[Ran]) -> list[Judged]:
    """Feed a fresh correction with all iterations; predict each before the correction learns from
    it.
    """
    corrected, judged = Corrected(base), list[Judged]()
    base_s = np.array([base.batch_s(each.shape) for each in ran])
    times = np.array([each.exec_s for each in ran]) / base_s
    late = deque[tuple[float, float]](maxlen=WINDOW)  # measured, predicted
    for n, (at_s, shape, exec_s) in enumerate(ran):
        regime = Regime.of(shape)
        predicted_s = corrected.gammas[regime] * float(base_s[n])
        leaning = abs(exec_s - corrected.batch_s(shape)) / exec_s
        corrected.observe(shape, exec_s)
        late.append((exec_s, predicted_s))
        measured_s, expected_s = map(sum, zip(*late, strict=True))
        best = best_constant(times[max(0, n - WINDOW) : n + WINDOW + 1])
        judged.append(
            Judged(
                at_s,
                regime,
                abs(exec_s - predicted_s) / exec_s,
                leaning,
                corrected.residual,
                abs(1 - best / float(times[n])),
                abs(measured_s - expected_s) / measured_s,
            )
        )
    return judged


def best_constant(times: "np.ndarray[Any, np.dtype[np.float64]]") -> float:
    """The constant that minimises the sum of |1 - constant / times|: the median of the times, each
    weighted by its inverse.
    """
    order = np.sort(times)
    weights = np.cumsum(1 / order)
    return float(order[np.searchsorted(weights, weights[-1] / 2)])


def summary(
    judged: Sequence[Judged], phases: Sequence[tuple[str, float, float]]
) -> list[dict[str, Any]]:
    """One row per (name, from, to) in seconds."""
    rows = []
    for name, begin_s, end_s in phases:
        some = [each for each in judged if begin_s <= each.at_s < end_s]
        if not some:
            continue
        residual = np.array([each.residual for each in some])
        off = np.array([each.off for each in some])
        together = np.array([each.together for each in some])
        rows.append(
            {
                "phase": name,
                "from_s": round(begin_s, 1),
                "to_s": round(end_s, 1),
                "iterations": len(some),
                "residual_median": round(float(np.median(residual)), 4),
                "residual_p90": round(float(np.quantile(residual, 0.9)), 4),
                "residual_under_10": round(float((residual < 0.10).mean()), 3),
                "single_mean": round(float(off.mean()), 4),
                "single_median": round(float(np.median(off)), 4),
                "single_p90": round(float(np.quantile(off, 0.9)), 4),
                "leaning_mean": round(float(np.mean([each.leaning for each in some])), 4),
                "hindsight_mean": round(float(np.mean([each.hindsight for each in some])), 4),
                "together_median": round(float(np.median(together)), 4),
                "together_p90": round(float(np.quantile(together, 0.9)), 4),
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as text, shares in percent."""
    columns = {
        "residual: median": "residual_median",
        "p90": "residual_p90",
        "under 10": "residual_under_10",
        "single: mean": "single_mean",
        "with margin": "leaning_mean",
        "in hindsight": "hindsight_mean",
        "together: median": "together_median",
        "p90 ": "together_p90",
    }
    lines = [
        f"{'percent':26}{'iterations':>12}"
        + "".join(f"{head:>{max(8, len(head) + 2)}}" for head in columns)
    ]
    for row in rows:
        cells = (f"{100 * row[key]:>{max(8, len(head) + 2)}.1f}" for head, key in columns.items())
        lines.append(f"{row['phase']:26}{row['iterations']:>12}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m services.worker.bench.residuals",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--model", required=True, metavar="FOLDER", help="in Hugging Face format")
    parser.add_argument(
        "--profile",
        default="",
        metavar="NAME",
        help="a shipped profile, or a file (default: measured)",
    )
    parser.add_argument(
        "--profile-s",
        type=float,
        default=4.0,
        metavar="S",
        help="seconds to measure the engine (default: 4)",
    )
    parser.add_argument(
        "--phase-s",
        type=float,
        default=12.0,
        metavar="S",
        help="seconds of each of the three phases (default: 12)",
    )
    parser.add_argument(
        "--burners",
        type=int,
        default=2,
        metavar="N",
        help="processes that load the machine (default: 2)",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows and every iteration there"
    )
    args = parser.parse_args()
    engine, _ = make(WorkerConfig(engine="torch", model=args.model))
    file = store.read(args.profile) if args.profile else fit_engine(engine, args.profile_s)
    if file is None:
        raise SystemExit(
            "the engine is too slow to be measured in that time: give it more with --profile-s"
        )
    each_s = args.phase_s
    ran = record(Mix(engine, Random(args.seed)), ((0, each_s), (args.burners, each_s), (0, each_s)))
    phases = [
        ("before", SETTLE_S, each_s),
        (f"{args.burners} burners: first second", each_s, each_s + SETTLE_S),
        (f"{args.burners} burners: then", each_s + SETTLE_S, 2 * each_s),
        ("after: first second", 2 * each_s, 2 * each_s + SETTLE_S),
        ("after: then", 2 * each_s + SETTLE_S, 3 * each_s),
    ]
    rows = summary(judge(file.profile(), ran), phases)
    print(table(rows))
    if args.json:
        report = {
            "profile": msgspec.to_builtins(file),
            "rows": rows,
            "iterations": [(each.at_s, tuple(each.shape), each.exec_s) for each in ran],
        }
        args.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
