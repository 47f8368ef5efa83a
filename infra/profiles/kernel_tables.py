"""Makes GPU profiles from NVIDIA's measured kernels, and compares ours with them.

    python infra/profiles/kernel_tables.py OTHER_PYTHON [DESTINATION]

OTHER_PYTHON is of an environment with `aiconfigurator-core==0.12.0` (PyPI, Apache-2.0), which has
tables of kernels as measured under vLLM 0.24, and adds them up for a batch. Each profile is a fit
to batches drawn at random; its stated error is on batches that the fit did not see. Without a
DESTINATION nothing is written. It prints what the shipped A100 and H100 profiles say of the same
batches, divided by what the tables say.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

import msgspec

from shared.perf.fitting import Timed, coefficients, error_of
from shared.perf.online import Regime
from shared.perf.profile_file import ProfileFile, load
from shared.perf.shape import BatchShape

MODELS = {"llama3-8b": "Llama-3-8B", "llama3-70b": "Llama-3-70B"}
PATHS = {"llama3-8b": "meta-llama/Meta-Llama-3.1-8B", "llama3-70b": "meta-llama/Meta-Llama-3.1-70B"}
WEIGHTS_BYTES = {"llama3-8b": 16.06e9, "llama3-70b": 141.1e9}
KV_BYTES = {"llama3-8b": 131_072, "llama3-70b": 327_680}  # of a token, on all GPUs
USED = 0.9  # of a GPU's memory, by weights and KV
# Launch, sampling and bookkeeping of a lean engine take at least this.
OVERHEAD_S = 0.001
BATCHES, HELD_OUT = 1500, 5  # each fifth is held out
VERSIONS = {"a100_sxm": "0.14.0"}  # of vLLM; others: 0.24.0

NVIDIA = (
    "Kernels as NVIDIA measured them under vLLM 0.24 (aiconfigurator-core 0.12.0), added up; "
    "output projection included, the overhead is ours. "
)
SURE = {
    "h100": "Matrix products that Vidur and LLMServingSim measured on other H100s take 10 to 12 % "
    "longer: take it as within 15 %.",
    "h200": "Nothing else was compared: take it as within 15 %, as on the H100.",
    "b200": "Nothing else was compared: take it as within 25 %.",
    "l40s": "Nothing else was compared: take it as within 25 %.",
}


class Gpu(NamedTuple):
    system: str
    name: str
    memory_bytes: float


GPUS = {
    "a100": Gpu("a100_sxm", "A100-80GB", 80e9),
    "h100": Gpu("h100_sxm", "H100-80GB", 80e9),
    "h200": Gpu("h200_sxm", "H200-141GB", 141e9),
    "b200": Gpu("b200_sxm", "B200-180GB", 180e9),
    "l40s": Gpu("l40s", "L40S-48GB", 48e9),
}
# profile: GPU, model, tensor parallel
MADE = {
    "h100-llama3-8b": ("h100", "llama3-8b", 1),
    "h200-llama3-8b": ("h200", "llama3-8b", 1),
    "b200-llama3-8b": ("b200", "llama3-8b", 1),
    "l40s-llama3-8b": ("l40s", "llama3-8b", 1),
    "h100-llama3-70b-tp4": ("h100", "llama3-70b", 4),
    "h200-llama3-70b-tp4": ("h200", "llama3-70b", 4),
    "b200-llama3-70b-tp4": ("b200", "llama3-70b", 4),
}
COMPARED = {
    "a100-llama3-8b": ("a100", "llama3-8b", 1),
    "a100-llama3-70b-tp4": ("a100", "llama3-70b", 4),
    "h100-llama3-8b": ("h100", "llama3-8b", 1),
    "h100-llama3-70b-tp4": ("h100", "llama3-70b", 4),
}


class Batch(NamedTuple):
    """Equal prefills with equal contexts, and decodes with equal contexts."""

    prefills: int
    chunk_tokens: int
    cached_tokens: int
    decodes: int
    context_tokens: int

    @property
    def shape(self) -> BatchShape:
        shape = BatchShape().with_decodes(self.decodes, self.decodes * self.context_tokens)
        for _ in range(self.prefills):
            shape = shape.with_chunk(self.chunk_tokens, self.cached_tokens)
        return shape


def draw_batches(rng: Random, count: int) -> list[Batch]:
    """A third each of decodes, prefills, and both; lengths are spread over their logarithms."""

    def length(least: int, most: int) -> int:
        return round(least * (most / least) ** rng.random())

    batches = []
    for number in range(count):
        prefills = rng.choice((1, 1, 1, 2, 3)) if number % 3 else 0
        chunk = max(8, length(16, 4096) // prefills) if prefills else 0
        cached = rng.choice((0, 0, length(64, 8192))) if prefills else 0
        decodes = length(1, 256) if number % 3 != 1 else 0
        context = length(64, 8192) if decodes else 0
        batches.append(Batch(prefills, chunk, cached, decodes, context))
    return batches


# Runs in the other environment: batches come as CSV, seconds are printed.
ASK = """
import csv, sys
from aiconfigurator_core.sdk.rust_engine_step import RustForwardPassPerfModel
system, path, parallel, version = sys.argv[1:]
model = RustForwardPassPerfModel.from_native({
    "schema_version": 1, "model_path": path, "model_name": path, "system_name": system,
    "backend": "vllm", "backend_name": "vllm", "backend_version": version,
    "tp_size": int(parallel), "pp_size": 1})
for n, chunk, cached, decodes, context in (map(int, row) for row in csv.reader(sys.stdin)):
    print(model.estimate_forward_pass_time_ms({"scheduled_requests": {
        "num_prefill_requests": n, "sum_prefill_tokens": n * chunk,
        "sum_prefill_kv_tokens": n * cached, "num_decode_requests": decodes,
        "sum_decode_kv_tokens": decodes * context}}) / 1e3)
"""


def ask(python: str, gpu: str, model: str, parallel: int, batches: Sequence[Batch]) -> list[float]:
    """The seconds that the tables say of each batch."""
    system = GPUS[gpu].system
    asked = "\n".join(",".join(map(str, batch)) for batch in batches)
    arguments = [system, PATHS[model], str(parallel), VERSIONS.get(system, "0.24.0")]
    answer = subprocess.run(
        [python, "-c", ASK, *arguments],
        input=asked,
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return [float(line) for line in answer.stdout.split()]


def timed(python: str, of: tuple[str, str, int], batches: Sequence[Batch]) -> list[Timed]:
    return [
        Timed(batch.shape, seconds)
        for batch, seconds in zip(batches, ask(python, *of, batches), strict=True)
    ]


def made(name: str, timings: Sequence[Timed]) -> ProfileFile:
    gpu, model, parallel = MADE[name]
    kept = [one for n, one in enumerate(timings) if n % HELD_OUT]
    held_out = timings[::HELD_OUT]
    judged = coefficients(kept).profile(name, 0.0)
    room = USED * GPUS[gpu].memory_bytes * parallel - WEIGHTS_BYTES[model]
    against = (
        f"{len(held_out)} random batches that the fit did not see, as added up from kernels that "
        "were measured one by one, not by a running engine"
    )
    return ProfileFile(
        name=name,
        gpu=GPUS[gpu].name,
        model=MODELS[model],
        tensor_parallel=parallel,
        kv_capacity_tokens=int(room / KV_BYTES[model]),
        kv_bytes_per_token=KV_BYTES[model] // parallel,
        overhead_s=OVERHEAD_S,
        error=error_of(judged, held_out, against),
        provenance=NVIDIA + SURE[gpu],
        coefficients=coefficients(timings),
    )


def compare(name: str, timings: Sequence[Timed]) -> None:
    profile = load(name)
    print(f"{name}: ours, without its overhead, over the tables; median and 5 to 95 %")
    for regime in Regime:
        ratios = sorted(
            (profile.batch_s(shape) - OVERHEAD_S) / seconds
            for shape, seconds in timings
            if Regime.of(shape) is regime
        )
        low, high = ratios[len(ratios) // 20], ratios[-len(ratios) // 20]
        print(f"  {regime.name.lower():13} {median(ratios):.2f}  {low:.2f} to {high:.2f}")


def main(python: str, destination: Path | None) -> None:
    batches = draw_batches(Random(1), BATCHES)
    for name, of in COMPARED.items():
        compare(name, timed(python, of, batches))
    if destination is None:
        return
    for name, of in MADE.items():
        file = made(name, timed(python, of, batches))
        path = destination / f"{name}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n")
        print(path.name, file.error.mape)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) == 3 else None)
