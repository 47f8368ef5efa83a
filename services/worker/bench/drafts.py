"""Figures of drafting in the torch engine: what trees of each size cost and yield, beside no drafts
and transformers' assisted generation. A part of services.worker.bench.engine.

Seconds are CPU time of the one thread that computes, so that other work on the machine counts less;
on CUDA they are by the clock. Greedy; the prompts are questions as the shipped pair was trained on.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from services.worker.engines.draft_cost import measure_draft
from services.worker.engines.torch.engine import TorchEngine
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.perf.draft import DraftCost
from shared.perf.engine_figures import DraftSpeed
from shared.schemas import Sampling, Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

_WORDS = (
    "river house tree light stone walk water hand bird horse word night table road ship fire "
    "garden letter music paper school wind king snow bread city door field gold hour island job"
)
WORDS = _WORDS.split()
QUESTION = "<|im_start|>user\nWhat is a {}?<|im_end|>\n<|im_start|>assistant\n"
BATCHES = (1, 8, 32)
BUDGETS = (0, 1, 2, 4, 8, 16, 32, 64)  # drafts that all requests verify together
ALONE = 8  # requests one after the other, for batch 1
OUTPUT_TOKENS, QUICK_OUTPUT_TOKENS = 32, 6


def shape_of(drafts: float) -> tuple[int, int]:
    """Depth and width of the beam search for so many drafts of a request."""
    depth = max(1, min(8, round(1.5 * np.log2(1 + drafts))))
    return depth, 1 if drafts <= 3 else 3 if drafts <= 16 else 8


def wait_for(device: torch.device) -> None:
    """Waits until the device has computed what it was given."""
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize(device)


def time_passes(model: Any, now_s: Callable[[], float], note: Callable[[float], None]) -> None:
    """From now on `note` is told what each pass of this PagedModel takes, by the clock `now_s`. On
    CUDA these are the passes recorded so far, and those that are computed without.
    """

    def timed(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began_s = now_s()
            out = inner(*args)
            wait_for(model.device)
            note(now_s() - began_s)
            return out

        return call

    model._forward = timed(model._forward)
    if model._passes is not None:
        recorded = model._passes._passes
        for size, one in recorded.items():
            recorded[size] = one._replace(graph=SimpleNamespace(replay=timed(one.graph.replay)))


class DraftBench:
    def __init__(self, folder: Path, draft: Path, output_tokens: int) -> None:
        self.engine = TorchEngine(
            folder, profile="bench", kv_blocks=1024, draft=draft, prefix_caching=False
        )
        self.cost = measure_draft(self.engine)  # as a worker does, before passes are timed
        self._output_tokens = output_tokens
        tokenizer = Tokenizer.load(folder)
        self._prompts = [tokenizer.encode(QUESTION.format(word)) for word in WORDS]
        self._target, self._draft = (
            transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, dtype=self.engine.dtype, attn_implementation="sdpa"
            )
            .to(self.engine.device)
            .eval()
            for path in (folder, draft)
        )
        self._now_s = time.thread_time if self.engine.device.type == "cpu" else time.perf_counter
        self._forward_s = 0.0
        of_engine: Any = self.engine
        of_engine._clock = self._now_s  # of `drafted_s`
        for model in (of_engine._model, of_engine._draft._model):
            time_passes(model, self._now_s, self._note)

    def _note(self, took_s: float) -> None:
        self._forward_s += took_s

    def engine_s(self, batch: int, budget: int) -> DraftSpeed:
        """One round. With a budget below the batch the likeliest drafts of all are verified."""
        first = range(ALONE) if batch == 1 else (0,)
        made = iterations = 0
        whole_s = drafted_s = models_s = 0.0
        for n in first:
            self._forward_s = 0.0
            tokens, rounds, seconds, drafting_s = self._run(n, batch, budget)
            made, iterations = made + tokens, iterations + rounds
            whole_s, drafted_s = whole_s + seconds, drafted_s + drafting_s
            models_s += self._forward_s
        return DraftSpeed(
            batch=batch,
            budget=budget,
            tokens_per_s=made / whole_s,
            yielded=made / iterations / batch,
            iteration_s=whole_s / iterations,
            drafted_s=drafted_s / iterations,
            outside_s=(whole_s - models_s) / iterations,
        )

    def _run(self, first: int, batch: int, budget: int) -> tuple[int, int, float, float]:
        """Tokens, iterations, seconds, and those before the target's pass."""
        slots = [Slot(n) for n in range(batch)]
        for slot in slots:
            prompt = self._prompts[(first + slot) % len(self._prompts)]
            self.engine.load(Load(slot, prompt, 0, Sampling(temperature=0.0), 1))
        prompts = [len(self._prompts[(first + slot) % len(self._prompts)]) for slot in slots]
        self.engine.execute(
            [Work(slot, n, True) for slot, n in zip(slots, prompts, strict=True)], None
        )
        depth, width = shape_of(budget / batch)
        selection = Selection(
            method="slo_then_throughput",
            depth=pack([depth] * batch),
            width=pack([width] * batch),
            budget_tokens=batch + budget,
        )
        work = [Work(slot, 1 + (min(budget, depth * width)), True) for slot in slots]
        made, iterations, drafted_s = 0, 0, 0.0
        self._forward_s, began_s = 0.0, self._now_s()
        while made < batch * self._output_tokens:
            did = self.engine.execute(work, selection if budget else None)
            made, iterations = made + sum(len(one.tokens) for one in did.done), iterations + 1
            drafted_s += did.drafted_s
        took_s = self._now_s() - began_s
        for slot in slots:
            self.engine.release(slot)
        return made, iterations, took_s, drafted_s

    def generate(self, assisted: bool) -> float:
        """Tokens a second of `model.generate`, one request after the other."""
        helped: dict[str, Any] = {"assistant_model": self._draft} if assisted else {}
        began_s = self._now_s()
        for prompt in self._prompts[:ALONE]:
            self._target.generate(
                torch.tensor([prompt], device=self.engine.device),
                max_new_tokens=self._output_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                **helped,
            )
        return ALONE * self._output_tokens / (self._now_s() - began_s)


def measure_drafting(
    folder: Path, draft: Path, rounds: int, quick: bool
) -> tuple[DraftCost, list[DraftSpeed], float, float]:
    """The cost of the draft model; the best of `rounds` for each batch and budget; tokens a second
    of `generate` and of assisted generation.
    """
    bench = DraftBench(folder, draft, QUICK_OUTPUT_TOKENS if quick else OUTPUT_TOKENS)
    best: dict[tuple[int, int], DraftSpeed] = {}
    plain = assisted = 0.0
    for _ in range(rounds):
        plain, assisted = max(plain, bench.generate(False)), max(assisted, bench.generate(True))
        for batch in BATCHES[:1] if quick else BATCHES:
            for budget in BUDGETS:
                found = bench.engine_s(batch, budget)
                key = batch, budget
                if key not in best or found.tokens_per_s > best[key].tokens_per_s:
                    best[key] = found
    return bench.cost, list(best.values()), plain, assisted
