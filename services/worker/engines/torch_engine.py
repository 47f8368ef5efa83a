"""An engine for a real model in Hugging Face format: paged KV, ragged mixed batches, chunked
prefill.

On a CPU it computes in float32, and its tokens are transformers' own. `dtype="bfloat16"` halves the
weights. Where the processor multiplies bfloat16 in hardware it is several times faster at prefill,
and slower at single decodes. On CUDA it computes in bfloat16.

With a draft model (draft_model.py) a speculating entry is a tree of tokens, verified in the same
pass. At each node of its path the target draws its own token, from (seed, position) as without
drafts, and goes on while that token was drafted. So the output is the same with and without drafts,
whatever the request samples by. Without a draft model only the root is verified.
"""

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from services.worker.engine import Done, EngineFacts, EngineState, Likely, Outcome
from services.worker.engines import draft_model, paged
from services.worker.engines.adjusting import Written, adjusted
from services.worker.engines.attention import Part, Piece
from services.worker.engines.constraint import Constraint, Constraints
from services.worker.engines.paged_model import PagedModel
from services.worker.engines.prefixes import Prefix
from services.worker.engines.sampling import Draw, choose, likelihoods
from services.worker.engines.token_tree import Tree, trees_of
from shared import features
from shared.columns import unpack_list
from shared.core.turn import Load, Work
from shared.errors import ConfigError
from shared.perf.draft import DRAFT, DraftCost
from shared.policy.speculation import along, select
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
    prefix: Prefix
    computed: int = 0


class _Said(NamedTuple):
    """An entry's new tokens. `path`: the nodes of its tree whose logits gave the tokens."""

    path: list[int]
    tokens: list[int]
    logprobs: list[Likely]


class TorchEngine:
    """Implements services.worker.engine.Engine. Raises ConfigError for a folder without a model
    that it can run, and for a draft model with another tokenizer.

    `draft` is the folder of a draft model; None: no drafts. `profile` names the announced profile.
    `dtype` is float32 or bfloat16; None means the device's default. It uses OMP_NUM_THREADS
    threads, 1 without it (more threads than cores are far slower).
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
        draft: str | Path | None = None,
        prefix_caching: bool = True,
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
        if draft is not None:
            _check_tokenizers(tokenizer, Path(folder), Path(draft))
        self._draft = (
            None
            if draft is None
            else draft_model.DraftModel(
                Path(draft),
                where,
                getattr(torch, kind),
                kv_blocks=kv_blocks,
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
            features=features.ALL if ends else features.ALL - {features.STRUCTURED},
        )
        self._prefix_caching = prefix_caching
        self._blocks = paged.Blocks(kv_blocks, block_tokens)
        self._slots: dict[Slot, _Slot] = {}

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def drafting(self, cost: DraftCost) -> "TorchEngine":
        """The same engine with the measured cost of its draft model."""
        self._facts = self._facts._replace(draft=cost)
        return self

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
            Prefix(self._facts.block_tokens),
        )

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        if not work:
            return Outcome([], time.monotonic() - began_s)
        states = [self._slots[entry.slot] for entry in work]
        cached = self._find(work, states)
        trees = {} if selection is None else self._trees(work, states, selection, cached)
        drafted_s = time.monotonic() - began_s if trees else 0.0
        ids: list[int] = []
        parts: list[Part] = []
        rows: list[int] = []  # of the packed batch whose logits are needed
        root: dict[int, int] = {}  # entry -> which of those is behind its newest token
        news: list[int] = []  # positions that each entry computes
        for n, (entry, state) in enumerate(zip(work, states, strict=True)):
            left, before = len(state.tokens) - state.computed, state.computed
            tree = trees.get(n)
            if tree is not None and not self._grows(state, before + len(tree.tokens)):
                tree = trees[n] = tree.root()
            new = min(entry.tokens, left) if tree is None else len(tree.tokens)
            assert before + new <= self._facts.context_tokens, "over the context"
            if not self._grows(state, before + new):
                trees.pop(n, None)
                news.append(0)
                continue
            self._blocks.grow(state.place, before + new)
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
        if ids:
            logits = self._model.logits(ids, parts, rows)
            said = self._verify(logits, states, trees, root) if root else {}
        done = self._settle(work, states, news, trees, said)
        if cached:
            done = [
                did._replace(computed=did.computed + cached[n], cached=cached[n])
                if n in cached
                else did
                for n, did in enumerate(done)
            ]
        return Outcome(done, time.monotonic() - began_s, drafted_s=drafted_s)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        self._blocks.release(state.place)
        if self._draft is not None:
            self._draft.release(slot)
        state.place, state.computed = (
            paged.Place(
                self._facts.block_tokens, state.place.wanted_blocks * self._facts.block_tokens
            ),
            0,
        )
        state.prefix.restart()

    def release(self, slot: Slot) -> None:
        self._blocks.release(self._slots.pop(slot).place)
        if self._draft is not None:
            self._draft.release(slot)

    def snapshot(self) -> EngineState:
        return EngineState(self._blocks.free, list(self._slots))

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    # ------------------------------------------------------------ prefixes

    def _find(self, work: Sequence[Work], states: Sequence[_Slot]) -> dict[int, int]:
        """Lets the entries that begin take over blocks of others; how many positions each found.
        Only where all entries still have room: blocks that lie idle are no longer free then.
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

    def _missing(self, state: _Slot, tokens: int) -> int:
        return max(0, -(-tokens // self._facts.block_tokens) - len(state.place.blocks))

    def _grows(self, state: _Slot, tokens: int) -> bool:
        """Tells whether it can. Without shared blocks the plans never promise more than there is;
        blocks that were found may have been promised to a plan in flight.
        """
        return self._missing(state, tokens) <= self._blocks.free

    def check(self) -> None:
        """Raises AssertionError unless every block has its owners."""
        self._blocks.check(state.place for state in self._slots.values())
        if self._draft is not None:
            self._draft.check()

    # ------------------------------------------------------------ speculation

    def _trees(
        self,
        work: Sequence[Work],
        states: Sequence[_Slot],
        selection: Selection,
        beginning: Collection[int],
    ) -> dict[int, Tree]:
        """The tree to verify of each entry that speculates. Only a decode does, and none of the
        entries `beginning`, which were planned as prefills.
        """
        if self._draft is None:
            return {}
        depth, width = unpack_list(selection.depth), unpack_list(selection.width)
        speculating = [
            n
            for n, state in enumerate(states)
            if depth[n] > 0
            and n not in beginning
            and work[n].tokens > 1
            and len(state.tokens) > state.prompt
            and len(state.tokens) == state.computed + 1
        ]
        if not speculating:
            return {}
        asks = [
            draft_model.Ask(
                work[n].slot,
                states[n].tokens,
                depth[n],
                max(1, width[n]),
                states[n].sampling.temperature,
            )
            for n in speculating
        ]
        drafted = self._draft.draft(asks)
        caps = np.array([work[n].tokens for n in speculating], dtype=np.int32)
        needed = np.array([work[n].needed for n in speculating], dtype=np.float32)
        chosen = select(along(selection, speculating), caps, needed, drafted.candidates)
        roots = [states[n].tokens[-1] for n in speculating]
        return dict(zip(speculating, trees_of(roots, drafted, chosen), strict=True))

    def _verify(
        self,
        logits: torch.Tensor,
        states: Sequence[_Slot],
        trees: dict[int, Tree],
        root: dict[int, int],
    ) -> dict[int, "_Said"]:
        """The tokens of each entry that emits. All take a step together, from node to node, and an
        entry stops at the first token that was not drafted. The tokens join the text as they come,
        so that what the next one depends on (penalties, a format) is there.
        """
        said = {n: _Said([0], [], []) for n in root}
        going = list(root)
        while going:
            at = [root[n] + said[n].path[-1] for n in going]
            chosen = self._choose(
                logits if at == list(range(len(logits))) else logits[at], [states[n] for n in going]
            )
            further = []
            for n, (token, likely) in zip(going, chosen, strict=True):
                states[n].tokens.append(token)
                said[n].tokens.append(token)
                said[n].logprobs.extend(likely)
                tree = trees.get(n)
                node = None if tree is None else tree.child(said[n].path[-1], token)
                if node is not None and token not in states[n].ends:
                    said[n].path.append(node)
                    further.append(n)
            going = further
        return said

    def _settle(
        self,
        work: Sequence[Work],
        states: Sequence[_Slot],
        news: Sequence[int],
        trees: dict[int, Tree],
        said: dict[int, "_Said"],
    ) -> list[Done]:
        """The result of each entry. Accepted nodes move behind their root, rejected ones give their
        KV back.
        """
        done: list[Done] = []
        sources, targets = list[int](), list[int]()
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
        if self._draft is not None and trees:
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
                        [tree.beams[node] for node in said[n].path[1:]],
                    )
                    for n, tree in trees.items()
                ]
            )
        return done

    @staticmethod
    def _choose(
        logits: torch.Tensor, states: Sequence[_Slot]
    ) -> list[tuple[int, tuple[Likely, ...]]]:
        """The next token of each request, and its likelihood where asked. Position n of a request
        draws from (seed, n), where n counts from its first token.
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
                shown, [Draw(state.sampling, state.seed, len(state.tokens)) for state in states]
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


def _check_tokenizers(tokenizer: Tokenizer, target: Path, draft: Path) -> None:
    """Raises ConfigError unless both models mean the same by every token."""
    of_target = tokenizer.inner.get_vocab(with_added_tokens=True)
    of_draft = Tokenizer.load(draft).inner.get_vocab(with_added_tokens=True)
    differing = of_target.items() ^ of_draft.items()
    if differing:
        token = min(differing, key=lambda pair: pair[1])[0]
        raise ConfigError(
            f"the draft model in {draft} has another tokenizer than the model in {target}: "
            f"{len(of_draft)} and {len(of_target)} tokens, and they differ in {token!r}"
        )
