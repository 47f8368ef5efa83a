"""An engine for a real model in Hugging Face format: paged KV, ragged mixed batches, chunked
prefill.

On a CPU it computes in float32, and its tokens are transformers' own. `dtype="bfloat16"` halves the
weights. Where the processor multiplies bfloat16 in hardware it is several times faster at prefill,
and slower at single decodes. On CUDA it computes in bfloat16. It has no draft model: only the root
of a speculating entry is verified.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.engine import Done, EngineFacts, EngineState, Likely, Outcome
from services.worker.engines import paged
from services.worker.engines.adjusting import Written, adjusted
from services.worker.engines.attention import Piece
from services.worker.engines.constraint import Constraint, Constraints
from services.worker.engines.paged_model import PagedModel
from services.worker.engines.sampling import Draw, choose, likelihoods
from shared import features
from shared.core.turn import Load, Work
from shared.errors import ConfigError
from shared.schemas import Sampling, Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot


@dataclass(slots=True)
class _Slot:
    prompt: int  # number of prompt tokens
    tokens: list[int]  # prompt and output
    ends: frozenset[int]  # tokens that end its output
    place: paged.Place
    sampling: Sampling
    seed: int
    constraint: Constraint | None  # None: free text
    computed: int = 0


class TorchEngine:
    """Implements services.worker.engine.Engine. Raises ConfigError for a folder without a model
    that it can run.

    `profile` names the announced profile. `dtype` is float32 or bfloat16; None means the device's
    default. It uses OMP_NUM_THREADS threads, 1 without it (more threads than cores are far slower).
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
        dtype: str | None = None,
        model_name: str | None = None,
    ) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kind = dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if kind not in ("float32", "bfloat16"):
            raise ConfigError(f"the torch engine computes in float32 or bfloat16, not in {kind}")
        self._model = PagedModel(
            Path(folder), where, getattr(torch, kind), kv_blocks * block_tokens
        )
        tokenizer = Tokenizer.load(folder)
        ends = tokenizer.eos_token_ids  # without one no output could end where its format does
        self._constraints = (
            Constraints(Path(folder), self._model.vocabulary, ends) if ends else None
        )
        self._facts = EngineFacts(
            engine="torch",
            model=model_name or Path(folder).resolve().name,
            profile=profile,
            kv_blocks=kv_blocks,
            block_tokens=block_tokens,
            context_tokens=min(self._model.context_tokens, kv_blocks * block_tokens),
            max_slots=max_slots,
            vocabulary=self._model.vocabulary,
            eos_token_ids=ends,
            end_of_thinking=tokenizer.end_of_thinking,
            features=features.ALL if ends else features.ALL - {features.STRUCTURED},
        )
        self._blocks = paged.Blocks(kv_blocks, block_tokens)
        self._slots: dict[Slot, _Slot] = {}

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def load(self, load: Load) -> None:
        assert load.slot not in self._slots, f"slot {load.slot} is loaded already"
        assert len(self._slots) < self._facts.max_slots, "no slot is free"
        assert 0 <= load.generated < len(load.tokens) <= self._facts.context_tokens, (
            f"slot {load.slot}: impossible length"
        )
        wanted = min(
            len(load.tokens) - load.generated + load.sampling.max_tokens, self._facts.context_tokens
        )
        prompt, s = len(load.tokens) - load.generated, load.sampling
        ends = frozenset(s.stop_token_ids) | (
            frozenset() if s.ignore_eos else self._facts.eos_token_ids
        )
        constraint = None
        if s.structured is not None:
            assert self._constraints is not None, "structured output is not announced"
            constraint = self._constraints.start(s.structured, load.tokens[prompt:])
        self._slots[load.slot] = _Slot(
            prompt,
            list(load.tokens),
            ends,
            paged.Place(self._facts.block_tokens, wanted),
            s,
            load.seed,
            constraint,
        )

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        ids: list[int] = []
        pieces: list[Piece] = []
        states: list[_Slot] = []
        ends: list[int] = []  # rows of the packed batch whose logits are needed
        emitting: list[int] = []  # their entries in the work
        done: list[Done] = []
        for n, entry in enumerate(work):
            slot, asked, emits = entry.slot, entry.tokens, entry.emits
            state = self._slots[slot]
            left = len(state.tokens) - state.computed
            new = min(asked, left) if selection is not None else asked
            assert 1 <= new <= left, f"slot {slot}: {asked} tokens asked, {left} known"
            assert emits == (new == left), f"slot {slot}: emits is {emits} with {left} tokens left"
            end = state.computed + new
            assert end <= self._facts.context_tokens, "over the context"
            self._blocks.grow(state.place, end)
            ids += state.tokens[state.computed : end]
            pieces.append(Piece(state.computed, new, state.place))
            states.append(state)
            state.computed = end
            if emits:
                ends.append(len(ids) - 1)
                emitting.append(n)
            done.append(Done(new, ()))
        if work:
            logits = self._model.logits(ids, pieces, ends)
            if ends:
                chosen = self._choose(logits, [states[n] for n in emitting])
                for n, (token, likely) in zip(emitting, chosen, strict=True):
                    states[n].tokens.append(token)
                    held = states[n].constraint
                    done[n] = Done(
                        done[n].computed,
                        (token,),
                        logprobs=likely,
                        failed=held.failed if held is not None else "",
                    )
        return Outcome(done, time.monotonic() - began_s)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        self._blocks.release(state.place)
        state.place, state.computed = (
            paged.Place(
                self._facts.block_tokens, state.place.wanted_blocks * self._facts.block_tokens
            ),
            0,
        )

    def release(self, slot: Slot) -> None:
        self._blocks.release(self._slots.pop(slot).place)

    def snapshot(self) -> EngineState:
        return EngineState(self._blocks.free, list(self._slots))

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    @staticmethod
    def _choose(
        logits: torch.Tensor, states: Sequence[_Slot]
    ) -> list[tuple[int, tuple[Likely, ...]]]:
        """A token for each row, and its likelihood where asked. Position n of a request draws from
        (seed, n), where n counts from its first token.
        """
        with torch.inference_mode():
            shown = adjusted(
                logits,
                [
                    Written(state.sampling, state.prompt, state.tokens, state.ends)
                    for state in states
                ],
            )
            constraints = [(row, c) for row, s in enumerate(states) if (c := s.constraint)]
            if constraints and shown is logits:
                shown = logits.clone()
            for row, constraint in constraints:
                constraint.hold(shown[row])
            tokens = choose(
                shown, [Draw(state.sampling, state.seed, state.computed) for state in states]
            )
            for row, constraint in constraints:
                constraint.take(tokens[row : row + 1])
            likely: list[tuple[Likely, ...]] = [()] * len(states)
            rows = [row for row, state in enumerate(states) if state.sampling.logprobs is not None]
            if rows:
                tops = [states[row].sampling.logprobs or 0 for row in rows]
                found = likelihoods(logits[rows], [tokens[row] for row in rows], tops)
                for row, one in zip(rows, found, strict=True):
                    likely[row] = (one,)
            return list(zip(tokens, likely, strict=True))
