"""Figures of the torch engine beside transformers' own ways to generate, as JSON: `python -m
services.worker.bench.engine`.

Each way gets the same model, prompts, threads and number of tokens. They take turns, so that a busy
machine is busy for all of them; the fastest of several rounds counts. Greedy; float32 on a CPU,
bfloat16 on CUDA. Threads: OMP_NUM_THREADS, 1 without it.
"""

import argparse
import asyncio
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import transformers

from services.worker.bench.drafts import measure_drafting, time_passes
from services.worker.engines.torch.engine import TorchEngine
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.models import shipped as store
from shared.perf.draft import DraftCost
from shared.perf.engine_figures import CPU, DraftSpeed, EngineFigures, Speed
from shared.schemas import Sampling
from shared.vocabulary import Slot

BATCHES = (1, 8, 32)
PROMPT_TOKENS, PREFILL_TOKENS = 64, 512
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 32, 8
ROUNDS, QUICK_ROUNDS = 8, 1
NAP_S = 0.001  # sleep of the task that measures how late the event loop wakes it
_NATIVE = bytes(10_000_000)  # takes about as long to hash as an iteration
SETTLE = 2  # iterations after the prefill that do not count


class Bench:
    def __init__(self, folder: Path, output_tokens: int) -> None:
        self.engine = TorchEngine(folder, profile="bench", kv_blocks=1024, prefix_caching=False)
        self.output_tokens = output_tokens
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=self.engine.dtype, attn_implementation="sdpa"
        )
        self._model.to(self.engine.device).eval()
        self.parameters = sum(weights.numel() for weights in self._model.parameters())
        self._forward_s = 0.0
        time_passes(self.engine._model, time.perf_counter, self._note)

    def prompts(self, batch: int, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
        rng = Random(batch)
        return [
            [rng.randrange(3, self.engine.facts.vocabulary) for _ in range(tokens)]
            for _ in range(batch)
        ]

    # Each of these returns seconds per iteration.

    def engine_decode(self, batch: int) -> tuple[float, float]:
        """Seconds of an iteration, and the part of them outside the model."""
        with self.loaded(self.prompts(batch)) as work:
            for _ in range(SETTLE):
                self.engine.execute(work, None)
            self._forward_s, began_s = 0.0, time.perf_counter()
            for _ in range(self.output_tokens):
                self.engine.execute(work, None)
            took_s = time.perf_counter() - began_s
        return took_s / self.output_tokens, (took_s - self._forward_s) / self.output_tokens

    def engine_prefill(self) -> float:
        prompt = self.prompts(1, PREFILL_TOKENS)[0]
        self.engine.load(Load(Slot(0), prompt, 0, Sampling(temperature=0.0), 1))
        began_s = time.perf_counter()
        self.engine.execute([Work(Slot(0), len(prompt), True)], None)
        took_s = time.perf_counter() - began_s
        self.engine.release(Slot(0))
        return took_s

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Seconds of the whole generation."""
        began_s = time.perf_counter()
        self._model.generate(
            torch.tensor(prompts, device=self.engine.device),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return time.perf_counter() - began_s

    def generate_batch_decode(self, batch: int) -> float:
        """Seconds per token by the generator's own time stamps, from the instant at which the last
        prompt had its first tokens.
        """
        out = self._model.generate_batch(
            self.prompts(batch),
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                num_blocks=128, max_batch_tokens=4096
            ),
            max_new_tokens=1 + SETTLE + self.output_tokens,
            record_timestamps=True,
            warmup=False,
        )
        stamps = [result.timestamps for result in out.values()]
        first, last = max(stamp[SETTLE] for stamp in stamps), max(stamp[-1] for stamp in stamps)
        made = sum(sum(at > first for at in stamp) for stamp in stamps)
        return float((last - first) * batch / made)

    @contextmanager
    def loaded(self, prompts: Sequence[Sequence[int]]) -> Iterator[list[Work]]:
        """The work of an iteration of decodes; all prompts are computed."""
        for n, prompt in enumerate(prompts):
            self.engine.load(Load(Slot(n), prompt, 0, Sampling(temperature=0.0), 1))
        self.engine.execute(
            [Work(Slot(n), len(prompt), True) for n, prompt in enumerate(prompts)], None
        )
        yield [Work(Slot(n), 1, True) for n in range(len(prompts))]
        for n in range(len(prompts)):
            self.engine.release(Slot(n))

    def _note(self, took_s: float) -> None:
        self._forward_s += took_s


async def naps_late_s(beside: Callable[[], object] | None, seconds: float) -> list[float]:
    """The seconds by which naps of NAP_S were too long, while another thread repeats `beside`."""
    ended, late = time.perf_counter() + seconds, []
    with ThreadPoolExecutor(1) as pool:
        running = None
        while (began_s := time.perf_counter()) < ended:
            if beside is not None and (running is None or running.done()):
                running = pool.submit(beside)
            await asyncio.sleep(NAP_S)
            late.append(time.perf_counter() - began_s - NAP_S)
    return sorted(late)


def _name(device: torch.device) -> str:
    return CPU if device.type == CPU else torch.cuda.get_device_name(device)


def measure(
    folder: Path, draft: Path | None, quick: bool, say: Callable[[str], None]
) -> EngineFigures:
    rounds, output_tokens = (
        (QUICK_ROUNDS, QUICK_OUTPUT_TOKENS) if quick else (ROUNDS, OUTPUT_TOKENS)
    )
    bench = Bench(folder, output_tokens)
    best: dict[tuple[str, int], float] = {}

    def note(name: str, batch: int, seconds: float) -> None:
        best[name, batch] = min(best.get((name, batch), seconds), seconds)

    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        note("engine", 0, bench.engine_prefill())
        note("generate", 0, bench.generate(bench.prompts(1, PREFILL_TOKENS), 1))
        for batch in BATCHES:
            iteration_s, outside_s = bench.engine_decode(batch)
            note("engine", batch, iteration_s)
            note("outside", batch, outside_s)
            for tokens in (1 + SETTLE, 1 + SETTLE + output_tokens):
                note(f"generate {tokens}", batch, bench.generate(bench.prompts(batch), tokens))
            note("generate_batch", batch, bench.generate_batch_decode(batch))
    # the difference of the best two: the best difference of noisy times would be too small
    for batch in BATCHES:
        short_s, long_s = (
            best[f"generate {tokens}", batch] for tokens in (1 + SETTLE, 1 + SETTLE + output_tokens)
        )
        best["generate", batch] = max(long_s - short_s, 1e-9) / output_tokens
    drafting: list[DraftSpeed] = []
    cost: DraftCost = 0.0
    alone = assisted = 0.0
    if draft is not None:
        say("drafts")
        cost, drafting, alone, assisted = measure_drafting(folder, draft, min(rounds, 3), quick)
    seconds = 0.2 if quick else 2.0
    late = {
        "nothing": asyncio.run(naps_late_s(None, seconds)),
        "a thread of native code": asyncio.run(
            naps_late_s(lambda: hashlib.sha256(_NATIVE).digest(), seconds)
        ),
    }
    with bench.loaded(bench.prompts(BATCHES[-1])) as work:
        late[f"{BATCHES[-1]} decodes"] = asyncio.run(
            naps_late_s(lambda: bench.engine.execute(work, None), seconds)
        )
    speeds = [
        Speed(
            name="prefill",
            engine=PREFILL_TOKENS / best["engine", 0],
            generate=PREFILL_TOKENS / best["generate", 0],
        )
    ]
    speeds += [
        Speed(
            name=f"decode, batch {batch}",
            engine=batch / best["engine", batch],
            generate=batch / best["generate", batch],
            generate_batch=batch / best["generate_batch", batch],
        )
        for batch in BATCHES
    ]
    return EngineFigures(
        model=folder.resolve().name,
        parameters=bench.parameters,
        device=_name(bench.engine.device),
        threads=torch.get_num_threads(),
        rounds=rounds,
        speeds=speeds,
        iteration_s={batch: best["engine", batch] for batch in BATCHES},
        outside_s={batch: best["outside", batch] for batch in BATCHES},
        late_s={
            name: (times[len(times) // 2], times[len(times) * 99 // 100])
            for name, times in late.items()
        },
        draft=cost,
        drafting=drafting,
        generate_alone=alone,
        generate_assisted=assisted,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--model", default=store.DEFAULT, help="a shipped model or a folder in Hugging Face format"
    )
    parser.add_argument(
        "--draft-model",
        default="",
        help="a shipped model, a folder, or none (default: the draft of a shipped model)",
    )
    parser.add_argument("--quick", action="store_true", help="few tokens, one round")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    # it misses a package that only offloading needs
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    try:
        figures = measure(
            store.folder(args.model),
            store.draft_folder(args.draft_model, args.model),
            args.quick,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(msgspec.json.encode(figures).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
