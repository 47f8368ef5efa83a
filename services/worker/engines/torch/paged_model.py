"""Runs a transformers model over paged KV: tokens of many sequences in, wanted logits out."""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from services.worker.engines.torch.attention import attention, flat
from services.worker.engines.torch.attention.attention import Batch, Part, Piece, positions_of
from services.worker.engines.torch.attention.gathered import GatheredBatch
from services.worker.engines.torch.attention.in_place import InPlaceBatch, sparse_works
from services.worker.engines.torch.attention.packed import Kernel, flash
from services.worker.engines.torch.host import BlockRows
from services.worker.engines.torch.paged import Blocks, Place, Pool
from services.worker.engines.torch.recorded_passes import MOST_TOKENS, RecordedPasses
from shared.errors import ConfigError

log: structlog.stdlib.BoundLogger = structlog.get_logger()

_STRETCHED = {"dynamic", "longrope"}  # kinds of rotary positions
# computed once by transformers itself and once by us, in pieces short and long
_PROOF_TOKENS = 25
SAMPLE = 64  # numbers of each tensor of weights
_NOT_THE_MODEL = {"_name_or_path", "transformers_version", "architectures"}


class PagedModel:
    """One model and its KV. Raises ConfigError without a model, or if its tokens would differ."""

    def __init__(
        self, folder: Path, device: torch.device, dtype: torch.dtype, positions: Callable[[], int]
    ) -> None:
        """`positions` of the pool, over all sequences; asked once the weights are loaded."""
        self.device, self.dtype = device, dtype
        self._model: Any = _load(folder, device, dtype)  # transformers' classes are not typed
        self.positions = positions()
        config = self._model.config.get_text_config()
        if not hasattr(config, "max_position_embeddings"):
            raise ConfigError(f"the model in {folder} does not say how long its context is")
        self.context_tokens = int(config.max_position_embeddings)
        self.vocabulary = int(config.vocab_size)
        self._batch: Batch | None = None
        self._attend: attention.Attend = self._attend_in_batch
        self._forward: flat.Forward = self._plain
        self._pool = Pool(self.positions + 1)  # the last for padding
        self._in_place = False
        self._kernel: Kernel | None = None  # that packs chunks and decodes
        self._passes: RecordedPasses | None = None
        if device.type == "cuda":
            # cuDNN's attention plans each new shape anew, for 6 ms in every layer
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._sparse = device.type == "cpu" and sparse_works(dtype)
        self._settle(folder)

    def logits(self, ids: Sequence[int], parts: Sequence[Part], rows: Sequence[int]) -> Tensor:
        """[rows, vocabulary]. `ids` are the parts' new tokens, one part after the other; `rows`
        count in them. The caller is in inference mode, and reads the logits before it calls again.
        """
        if self._passes is not None:
            logits = self._passes.logits(ids, parts, rows)
            if logits is not None:
                return logits
        in_sequence, in_pool = positions_of(parts)
        tokens, positions, writes, logits_to_keep = torch.split_with_sizes(
            torch.from_numpy(np.array([*ids, *in_sequence, *in_pool, *rows])).to(self.device),
            [len(ids), len(ids), len(ids), len(rows)],
        )
        batch: Batch
        if self._in_place:
            batch = InPlaceBatch(self._pool, parts, writes, self.positions + 1, self._sparse)
        else:
            batch = GatheredBatch(self._pool, parts, writes, self.device, self._kernel)
        return self._compute(batch, tokens[None], positions[None], logits_to_keep)[0]

    @property
    def recorded(self) -> int:
        """The number of passes recorded since requests are served."""
        return 0 if self._passes is None else self._passes.later

    def finish(self) -> None:
        """Waits until all is computed: callers of a GPU notice only as they read a result."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def rows(self, block_tokens: int) -> BlockRows:
        """Its KV in blocks."""
        return BlockRows(block_tokens, self._pool.tensors)

    def layout(self, block_tokens: int) -> str:
        """A digest of all that the meaning of its KV's bytes depends on: their order, type and
        shapes, the configuration of the model, and SAMPLE numbers of each of its weights. Another
        model has another; one that was trained on may be missed where it changed no such number.
        """
        pools = [[str(pool.dtype), *pool.shape[1:]] for pool in self._pool.tensors]
        config = self._model.config.to_dict()
        known = {key: config[key] for key in sorted(config) if key not in _NOT_THE_MODEL}
        told = json.dumps([sys.byteorder, block_tokens, pools, known], sort_keys=True, default=str)
        digest = hashlib.blake2b(told.encode(), digest_size=16)
        for name, weights in self._model.named_parameters():
            numbers = weights.detach().flatten()
            some = numbers[:: max(1, len(numbers) // SAMPLE)][:SAMPLE]
            digest.update(name.encode())
            digest.update(some.to("cpu", torch.float32).numpy().tobytes())
        return digest.hexdigest()

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies keys and values between positions of the pool."""
        if sources:
            self._pool.move(
                torch.tensor(sources, device=self.device), torch.tensor(targets, device=self.device)
            )

    def _compute(self, batch: Batch, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        self._batch = batch
        out = self._forward(ids, positions, rows)
        self._batch = None
        return out

    def _plain(self, ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        out = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=rows,
            slackline_attend=self._attend,
        )
        return out.logits  # type: ignore[no-any-return]

    def _attend_in_batch(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        assert self._batch is not None, "attention outside of a pass"
        return self._batch.attend(layer, query, key, value, scale)

    def _settle(self, folder: Path) -> None:
        """Moves to the fastest path for this model that gives transformers' own logits."""
        tokens = min(_PROOF_TOKENS, self.positions, self.context_tokens)
        prompt = [(3 + 7 * n) % self.vocabulary for n in range(tokens)]
        try:
            with torch.inference_mode():
                wanted = self._model(
                    input_ids=torch.tensor([prompt], device=self.device), use_cache=False
                ).logits[0]
            self._model.set_attn_implementation(attention.NAME)
            proven = self._proves(prompt, wanted)
        except ConfigError:
            raise
        except Exception as error:  # from transformers or torch; a model may fail in any way
            raise ConfigError(
                f"the model in {folder} cannot be computed over a paged KV pool: {error}"
            ) from error
        if not self._pool.used:
            raise ConfigError(
                f"the attention of the model in {folder} cannot be replaced, so its KV cannot be "
                "paged"
            )
        if not proven:
            raise ConfigError(
                f"the model in {folder} computes other tokens over a paged KV pool than by itself: "
                "it keeps more than KV"
            )
        self._in_place = self.device.type == "cpu" and self._pool.even
        if self._in_place and not self._proves_or_logs("engine.cache_gathered", prompt, wanted):
            self._in_place = False
        if self.device.type == "cuda":
            self._kernel = flash
            if not self._proves_or_logs("engine.attention_not_packed", prompt, wanted):
                self._kernel = None
        self._attend = flat.traced_attend
        try:
            self._forward = flat.flatten(
                self._plain, self._model, self._attend_in_batch, self.device
            )
        except Exception as error:  # torch.export has no class of its own for what it cannot follow
            log.info("engine.model_not_flat", reason=str(error).split("\n", 1)[0])
        self._attend = self._attend_in_batch
        if self.is_flat and not self._proves_or_logs("engine.model_not_flat", prompt, wanted):
            self._forward = self._plain
        if self.is_flat and self.device.type == "cuda":
            try:
                self._pad()
            except RuntimeError as error:  # no memory, or an operation that cannot be recorded
                log.info("engine.passes_not_recorded", reason=str(error).split("\n", 1)[0])
            if not self._proves_or_logs("engine.passes_not_recorded", prompt, wanted):
                self._passes = None

    @torch.inference_mode()
    def _pad(self) -> None:
        """From now on, batches that fit are computed in padded passes, which a GPU records."""
        self._passes = RecordedPasses(
            self._compute,
            self._pool,
            self.positions,
            torch.empty(MOST_TOKENS, self.vocabulary, dtype=self.dtype, device=self.device),
            seen=min(self.context_tokens, self.positions),
        )

    @property
    def is_flat(self) -> bool:
        return self._forward != self._plain

    def _proves_or_logs(self, event: str, prompt: Sequence[int], wanted: Tensor) -> bool:
        """Tells whether the present path gives the right logits; logs `event` if it does not."""
        try:
            proven, reason = self._proves(prompt, wanted), "other logits"
        except Exception as error:  # shapes that a kernel does not take
            proven, reason = False, str(error).split("\n", 1)[0]
        if not proven:
            log.info(event, reason=reason)
        return proven

    @torch.inference_mode()
    def _proves(self, prompt: Sequence[int], wanted: Tensor) -> bool:
        """Tells whether these tokens, alone and beside each other, have the logits `wanted`."""
        return all(
            self._proves_beside(count, prompt, wanted)
            for count in sorted({1, min(4, self.positions // len(prompt))})
        )

    def _proves_beside(self, count: int, prompt: Sequence[int], wanted: Tensor) -> bool:
        """`count` sequences in two chunks and a decode."""
        tokens = len(prompt)
        blocks, places = Blocks(self.positions, 1), [Place(1, tokens) for _ in range(count)]
        allowed = (1e-3 if wanted.dtype == torch.float32 else 0.1) * float(wanted.abs().max())
        before = 0
        for end in sorted({min(5, tokens), max(tokens - 1, 1), tokens}):
            for place in places:
                blocks.grow(place, end)
            rows = [(n + 1) * (end - before) - 1 for n in range(count)]
            got = self.logits(
                [*prompt[before:end]] * count,
                [Piece(before, end - before, place) for place in places],
                rows,
            )
            if not float((got - wanted[end - 1]).abs().max()) <= allowed:  # also false for NaN
                return False
            before = end
        return True


def _load(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    attention.register()
    disable_progress_bar()  # a service's output is its log
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype, attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no model that transformers can load in {folder}: {error}") from error
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or []) - {
        "full_attention",
        "sliding_attention",
    }
    if kinds:
        raise ConfigError(
            f"the model in {folder} has layers this engine cannot compute: "
            f"{', '.join(sorted(kinds))}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if _STRETCHED & {
        str(value)
        for part in (rope, *rope.values())
        if isinstance(part, dict)
        for value in part.values()
    }:
        raise ConfigError(
            f"the model in {folder} scales its positions by the longest of a batch, so requests "
            "would change each other's tokens"
        )
    return model.to(device).eval()
