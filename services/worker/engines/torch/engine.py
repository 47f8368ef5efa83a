"""An engine for a real model in Hugging Face format: paged KV, ragged mixed batches, chunked
prefill.

On a CPU the engine computes in float32, with transformers' own tokens. There `dtype="bfloat16"`
halves the weights; with hardware for it prefill is several times faster, single decodes slower. On
CUDA the default is bfloat16.

A speculating entry is a tree of tokens (drafting.py), verified in the same pass. At each node the
target draws its own token (verification.py), from (seed, position) as without drafts, and goes on
while that was drafted: so the output is the same. Without a draft model only the root is verified.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from services.worker.engine import (
    Done,
    EngineFacts,
    EngineState,
    KnowsFacts,
    KvFacts,
    KvName,
    Lacking,
    Outcome,
)
from services.worker.engines.torch import draft_model, paged
from services.worker.engines.torch.attention.attention import Part, Piece
from services.worker.engines.torch.constraint import Constraint, Constraints
from services.worker.engines.torch.draft_model import roomy_blocks
from services.worker.engines.torch.drafting import check_tokenizers, trees_to_verify
from services.worker.engines.torch.host import HostKv, put
from services.worker.engines.torch.kv_room import blocks_that_fit
from services.worker.engines.torch.paged_model import PagedModel
from services.worker.engines.torch.prefixes import Prefix
from services.worker.engines.torch.running import Running
from services.worker.engines.torch.token_tree import Tree
from services.worker.engines.torch.verification import Said, verify
from shared import features
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.perf.draft import DRAFT
from shared.schemas import Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

CPU_KV_BLOCKS = 2048
NOTHING_S = 0.002  # the duration of an iteration in which formats are compiled, and nothing else


class TorchEngine(KnowsFacts):
    """Implements Engine (services/worker/engine.py). Raises ConfigError for a folder without a
    model that it can run, or a draft with another tokenizer.

    `kv_blocks` 0: what fits on a GPU, or 2048. `draft`: a draft model's folder, with
    `draft_kv_blocks` (0: a quarter more than the target). `profile`: the announced one. `dtype`:
    float32, bfloat16, or the device's default. `host_kv_tokens`: in the host's memory. It uses
    OMP_NUM_THREADS threads, or 1: more threads than cores are far slower.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        profile: str,
        kv_blocks: int = 0,
        block_tokens: int = 16,
        max_slots: int = 256,
        device: str | None = None,
        dtype: str | None = None,
        model_name: str | None = None,
        draft: str | Path | None = None,
        draft_kv_blocks: int = 0,
        prefix_caching: bool = True,
        host_kv_tokens: int = 0,
    ) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        kind = dtype or ("bfloat16" if where.type == "cuda" else "float32")
        if kind not in ("float32", "bfloat16"):
            raise ConfigError(f"the torch engine computes in float32 or bfloat16, not in {kind}")
        of_numbers: torch.dtype = getattr(torch, kind)

        def positions() -> int:
            if kv_blocks:
                return kv_blocks * block_tokens
            if where.type != "cuda":
                return CPU_KV_BLOCKS * block_tokens
            torch.cuda.empty_cache()  # what loading took
            return block_tokens * blocks_that_fit(
                torch.cuda.mem_get_info(where)[0],
                Path(folder),
                None if draft is None else Path(draft),
                dtype=of_numbers,
                block_tokens=block_tokens,
                max_slots=max_slots,
            )

        self._model = PagedModel(Path(folder), where, of_numbers, positions)
        kv_blocks = self._model.positions // block_tokens
        tokenizer = Tokenizer.load(folder)
        if draft is not None:
            check_tokenizers(tokenizer, Path(folder), Path(draft))
        self._draft = (
            None
            if draft is None
            else draft_model.DraftModel(
                Path(draft),
                where,
                of_numbers,
                kv_blocks=draft_kv_blocks or roomy_blocks(kv_blocks),
                block_tokens=block_tokens,
                vocabulary=self._model.vocabulary,
                prefix_caching=prefix_caching,
            )
        )
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
            draft=DRAFT if draft is not None else 0.0,
            draft_kv_blocks=0 if self._draft is None else self._draft.kv_blocks,
            draft_context_tokens=0 if self._draft is None else self._draft.context_tokens,
            host_kv_blocks=host_kv_tokens // block_tokens,
            features=features.ALL if ends else features.ALL - {features.STRUCTURED},
        )
        self._prefix_caching = prefix_caching
        self._rows, self._host = self._model.rows(block_tokens), None
        if prefix_caching:
            block_bytes = self._rows.width * self._rows.dtype.itemsize
            layout = self._model.layout(block_tokens)
            self._facts = self._facts._replace(kv=KvFacts(block_tokens, block_bytes, layout))
        if self._facts.host_kv_blocks:
            self._host = HostKv(self._facts.host_kv_blocks, self._rows)
            self._facts = self._facts._replace(kv_load_s=self._host.token_load_s())
        self._blocks = paged.Blocks(kv_blocks, block_tokens, self._host)
        self._slots: dict[Slot, Running] = {}

    def load(self, load: Load) -> None:
        self._check(load, self._slots)
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
        self._slots[load.slot] = Running(
            prompt,
            list(load.tokens),
            ends,
            paged.Place(self._facts.block_tokens, wanted),
            s,
            load.seed,
            constraint,
            Prefix(self._facts.block_tokens, load.salt),
            load.keep_s,
        )

    @torch.inference_mode()
    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        if not work:
            return Outcome([], time.monotonic() - began_s)
        recorded = self._recorded()
        states = [self._slots[entry.slot] for entry in work]
        cached = self._find(work, states)
        drafts_s, trees = time.monotonic(), dict[int, Tree]()
        if selection is not None and self._draft is not None:
            trees = trees_to_verify(self._draft, work, states, selection, cached)
        drafted_s = time.monotonic() - drafts_s if trees else 0.0
        drafted = list(trees)
        ids: list[int] = []
        parts: list[Part] = []
        rows: list[int] = []  # of the packed batch whose logits are needed
        root: dict[int, int] = {}  # entry -> which of those is behind its newest token
        news: list[int] = []  # positions that each entry computes
        waiting: Constraint | None = None  # of an entry that does nothing now
        for n, (entry, state) in enumerate(zip(work, states, strict=True)):
            left, before = len(state.tokens) - state.computed, state.computed
            tree = trees.get(n)
            if tree is not None and not self._blocks.grow(state.place, before + len(tree.tokens)):
                tree = trees[n] = tree.root()
            new = min(entry.tokens, left) if tree is None else len(tree.tokens)
            assert before + new <= self._facts.context_tokens, "over the context"
            # A format that is not compiled yet lets the others go on. Without shared blocks the
            # plans never promise more than there is; blocks that were found may have been promised
            # to a plan in flight.
            compiling = (
                new >= left and state.constraint is not None and not state.constraint.ready()
            )
            if compiling or not self._blocks.grow(state.place, before + new):
                waiting = state.constraint if compiling else waiting
                trees.pop(n, None)
                news.append(0)
                continue
            if tree is None:
                ids += state.tokens[before : before + new]
                parts.append(Piece(before, new, state.place))
            else:
                ids += tree.tokens
                parts += tree.parts(state.place, before)
            if new >= left:
                root[n] = len(rows)
                rows += range(len(ids) - (1 if tree is None else new), len(ids))
            news.append(new)
        said = {}
        loaded_s = 0.0
        if self._host is not None:
            self._host.flush()
            loaded_s, self._host.loaded_s = self._host.loaded_s, 0.0
        if ids:
            logits = self._model.logits(ids, parts, rows)
            said = verify(logits, states, trees, root) if root else {}
        elif waiting is not None:
            waiting.ready(NOTHING_S)
        if not said:
            self._model.finish()  # nothing was read
        done = self._settle(work, states, news, trees, said, drafted)
        if cached:
            done = [
                did._replace(computed=did.computed + cached[n], cached=cached[n])
                if n in cached
                else did
                for n, did in enumerate(done)
            ]
        return Outcome(
            done,
            time.monotonic() - began_s,
            drafted_s=drafted_s,
            loaded_s=loaded_s,
            unusual=self._recorded() > recorded,
            prefixes=self._blocks.changes.take(),
        )

    def _recorded(self) -> int:
        """The number of passes of both models recorded since requests are served."""
        return self._model.recorded + (0 if self._draft is None else self._draft.recorded)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        self._blocks.release(state.place, time.monotonic(), state.keep_s)
        if self._draft is not None:
            self._draft.release(slot)
        size = self._facts.block_tokens
        state.place = paged.Place(size, state.place.wanted_blocks * size)
        state.computed = 0
        state.prefix.restart()

    def release(self, slot: Slot) -> None:
        state = self._slots.pop(slot)
        self._blocks.release(state.place, time.monotonic(), state.keep_s)
        if self._draft is not None:
            self._draft.release(slot)

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        size = self._facts.block_tokens
        names = Prefix(size, salt).names(tokens[: len(tokens) - 1])
        found, away = self._blocks.lacking(names, time.monotonic())
        return Lacking(found * size, away)

    @torch.inference_mode()
    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        places = self._blocks.places(digests)
        on_gpu = [n for n, place in enumerate(places) if isinstance(place, int)]
        if on_gpu:
            blocks = [place for place in places if isinstance(place, int)]
            self._rows.take_out(blocks, [into[n] for n in on_gpu])
        for place, target in zip(places, into, strict=True):
            if isinstance(place, torch.Tensor):
                put(place[None], [target])
        return [place is not None for place in places]

    @torch.inference_mode()
    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        def write(blocks: Sequence[int], numbers: Sequence[int]) -> None:
            self._rows.bring_in(blocks, [payloads[n] for n in numbers])

        return self._blocks.bring_in(names, time.monotonic(), write)

    def snapshot(self) -> EngineState:
        return EngineState(
            self._blocks.free,
            list(self._slots),
            self._blocks.shared,
            0 if self._draft is None else self._draft.shared_blocks,
        )

    def restart(self) -> None:
        self.close()
        self._blocks.forget()

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    # ------------------------------------------------------------ prefixes

    def _find(self, work: Sequence[Work], states: Sequence[Running]) -> dict[int, int]:
        """Lets entries that begin share blocks of others. Returns the positions that each found.
        Only where all entries still have room: idle blocks that are shared are free no more.
        """
        for entry, state in zip(work, states, strict=True):
            left = len(state.tokens) - state.computed
            assert entry.tokens >= 1, f"slot {entry.slot}: {entry.tokens} tokens asked"
            # only a decode may be asked for more: for drafts
            assert entry.tokens <= left or left == 1, f"slot {entry.slot}: {left} tokens known"
            assert entry.emits == (entry.tokens >= left), f"slot {entry.slot}: emits is wrong"
        beginning = [n for n, state in enumerate(states) if not state.place.blocks]
        if not self._prefix_caching or not beginning:
            return {}
        spare = self._blocks.free - sum(
            self._missing(state, state.computed + entry.tokens)
            for entry, state in zip(work, states, strict=True)
        )
        cached = {}
        for n in beginning:
            state = states[n]
            before, needed = self._blocks.free, self._missing(state, work[n].tokens)
            state.computed = state.prefix.begin(
                self._blocks, state.place, state.tokens, max(spare, 0)
            )
            if state.computed:
                cached[n] = state.computed
                new = min(work[n].tokens, len(state.tokens) - state.computed)
                spare -= before - self._blocks.free
                spare += needed - self._missing(state, state.computed + new)
        return cached

    def _missing(self, state: Running, tokens: int) -> int:
        return max(0, -(-tokens // self._facts.block_tokens) - len(state.place.blocks))

    def check(self) -> None:
        """Raises AssertionError unless every block has its owners."""
        self._blocks.check(state.place for state in self._slots.values())
        if self._draft is not None:
            self._draft.check()

    # ------------------------------------------------------------ after the pass

    def _settle(
        self,
        work: Sequence[Work],
        states: Sequence[Running],
        news: Sequence[int],
        trees: dict[int, Tree],
        said: dict[int, Said],
        drafted: Sequence[int],
    ) -> list[Done]:
        """The result of each entry. Accepted nodes move behind their root, rejected ones give their
        KV back. `drafted`: the entries of `trees`, and those that then had no room.
        """
        done: list[Done] = []
        sources: list[int] = []
        targets: list[int] = []
        for n, (state, new) in enumerate(zip(states, news, strict=True)):
            tree, of, before = trees.get(n), said.get(n), state.computed
            if of is None:
                state.computed += new
                done.append(Done(new, ()))
                continue
            state.computed += new if tree is None else len(of.path)
            if tree is not None and of.path[-1] != len(of.path) - 1:
                own = state.place.positions(before, before + new)
                sources += own[of.path].tolist()
                targets += own[: len(of.path)].tolist()
            held = state.constraint
            done.append(
                Done(
                    state.computed - before,
                    of.tokens,
                    0 if tree is None else tree.drafts,
                    of.logprobs,
                    failed=held.failed if held is not None else "",
                )
            )
        if self._prefix_caching:
            for n, state in enumerate(states):
                if news[n] and n not in trees:
                    state.prefix.name(self._blocks, state.place, state.tokens, state.computed)
        if self._draft is not None and drafted:
            self._model.move(sources, targets)
            for state in [states[n] for n in trees]:
                self._blocks.shrink(state.place, state.computed)
                if self._prefix_caching:
                    state.prefix.name(self._blocks, state.place, state.tokens, state.computed)
            self._draft.keep(
                [
                    draft_model.Accepted(
                        work[n].slot,
                        states[n].tokens,
                        [trees[n].beams[node] for node in said[n].path[1:]] if n in trees else [],
                    )
                    for n in drafted
                ]
            )
        return done
