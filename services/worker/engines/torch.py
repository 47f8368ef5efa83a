"""A real model in Hugging Face format, on CPU (float32) or CUDA (bfloat16): paged KV, ragged mixed batches, chunked prefill.

It has no draft model: of a speculating entry the root alone is verified.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from services.worker.engine import Done, EngineFacts, EngineState, Load, Outcome, Work
from services.worker.engines import paged
from services.worker.engines.sampling import Draw, choose
from shared.errors import ConfigError
from shared.schemas import Sampling, Selection
from shared.text import Tokenizer
from shared.vocabulary import Slot


@dataclass(slots=True)
class _Slot:
    tokens: list[int]  # prompt and generated
    blocks: list[int]
    sampling: Sampling
    seed: int
    computed: int = 0


class TorchEngine:
    """Implements services.worker.engine.Engine. Raises ConfigError for a folder that holds no model it can run.

    `profile` names the profile announced with it. Threads: OMP_NUM_THREADS, 1 without it (more than cores is far slower).
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        profile: str,
        kv_blocks: int = 1024,
        block_tokens: int = 16,
        max_slots: int = 256,
        device: str | None = None,
        model_name: str | None = None,
    ) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: Any = _load_model(Path(folder), self._device)  # transformers' classes are not typed
        config = self._model.config.get_text_config()
        if not hasattr(config, "max_position_embeddings"):
            raise ConfigError(f"the model in {folder} does not say how long its context is")
        self._facts = EngineFacts(
            engine="torch",
            model=model_name or Path(folder).resolve().name,
            profile=profile,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            context_tokens=min(config.max_position_embeddings, kv_blocks * block_tokens),
            max_slots=max_slots,
            vocabulary=config.vocab_size,
            eos_token_ids=Tokenizer.load(folder).eos_token_ids,
        )
        self._blocks = paged.Blocks(kv_blocks, block_tokens)
        self._pool = paged.Pool(kv_blocks, block_tokens)
        self._slots: dict[Slot, _Slot] = {}
        self._warm_up()

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def load(self, load: Load) -> None:
        assert load.slot not in self._slots, f"slot {load.slot} is loaded already"
        assert len(self._slots) < self._facts.max_slots, "no slot is free"
        assert 0 <= load.generated < len(load.tokens) <= self._facts.context_tokens, f"slot {load.slot}: impossible length"
        self._slots[load.slot] = _Slot(list(load.tokens), [], load.sampling, load.seed)

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        ids: list[int] = []
        positions: list[int] = []
        pieces: list[paged.Piece] = []
        ends: list[int] = []  # rows of the packed batch whose logits are wanted
        draws: list[Draw] = []
        done: list[Done] = []
        for slot, asked, emits in work:
            state = self._slots[slot]
            left = len(state.tokens) - state.computed
            new = min(asked, left) if selection is not None else asked
            assert 1 <= new <= left, f"slot {slot}: {asked} tokens asked, {left} known"
            assert emits == (new == left), f"slot {slot}: emits is {emits} with {left} tokens left"
            end = state.computed + new
            assert end <= self._facts.context_tokens, "over the context"
            self._blocks.grow(state.blocks, end)
            ids += state.tokens[state.computed : end]
            positions += range(state.computed, end)
            pieces.append(paged.Piece(state.computed, new, state.blocks))
            state.computed = end
            if emits:
                ends.append(len(ids) - 1)
                draws.append(Draw(state.sampling, state.seed, end))
            done.append(Done(new, ()))
        if work:
            tokens = iter(self._forward(ids, positions, pieces, ends, draws))
            for n, entry in enumerate(work):
                if entry.emits:
                    token = next(tokens)
                    self._slots[entry.slot].tokens.append(token)
                    done[n] = Done(done[n].computed, (token,))
        return Outcome(done, time.monotonic() - began_s)

    def release(self, slot: Slot) -> None:
        self._blocks.release(self._slots.pop(slot).blocks)

    def snapshot(self) -> EngineState:
        return EngineState(self._blocks.free, list(self._slots))

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    def _forward(
        self, ids: Sequence[int], positions: Sequence[int], pieces: Sequence[paged.Piece], ends: Sequence[int], draws: Sequence[Draw]
    ) -> list[int]:
        """The tokens chosen at `ends`. Position n of a request draws from (seed, n), n counting prompt and output from 0."""
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                use_cache=False,
                logits_to_keep=torch.tensor(ends, dtype=torch.long, device=self._device),
                slackline_batch=paged.Batch(self._pool, pieces, self._device),
            )
            return choose(out.logits[0], draws) if ends else []

    def _warm_up(self) -> None:
        """One token through the model, so that one that cannot run here fails at the start and not at the first request."""
        self.load(Load(Slot(0), [0], 0, Sampling(temperature=0.0), 0))
        self.execute([Work(Slot(0), 1, True)], None)
        self.release(Slot(0))
        if not self._pool.used:
            raise ConfigError("this model's attention cannot be replaced, so its KV cannot be paged")


def _load_model(folder: Path, device: torch.device) -> Any:
    paged.register()
    disable_progress_bar()  # a service's output is its log
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            attn_implementation=paged.NAME,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no model that transformers can load in {folder}: {error}") from error
    return model.to(device).eval()
