"""Runs vLLM under our plans: its model, KV cache, sampler and grammars; the plan decides what each
iteration computes.

One plan is one step of vLLM's core, whose scheduler is `PlannedScheduler`. The worker decides
where an output ends and which text is sent. Prefix caching is vLLM's: a request that begins may be
further than its entry planned. Drafts are vLLM's, made as they are verified (drafter.py).

Deviation from the seam: a seeded request draws alike after a preemption, but not on another
replica; with drafts only under equal plans.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

from services.worker.engine import (
    Done,
    EngineFacts,
    EngineState,
    KnowsFacts,
    KvName,
    Lacking,
    Likely,
    Outcome,
    RefusedError,
)
from services.worker.engines.vllm.drafter import Unread, draft
from services.worker.engines.vllm.kept import KeptInVllm
from services.worker.engines.vllm.moving import Moving
from services.worker.engines.vllm.sampling import sampling_params
from services.worker.engines.vllm.scheduler import Entry, PlannedScheduler
from shared.core.worker.step import Load, Work
from shared.policy.speculation import depths_of
from shared.prefix import chain_of
from shared.schemas import Selection
from shared.vocabulary import Slot

GRAMMAR_S = 10.0  # a request whose grammar takes longer to compile fails
# The duration of an iteration in which nothing could run; grammars are compiled meanwhile.
NOTHING_S = 0.002


@dataclass(slots=True)
class _Slot:
    request: Request
    loaded_s: float  # monotonic
    prefixes: Sequence[Any]  # as KeptInVllm.ask has them
    computed: int = 0
    entered: bool = False  # it has had KV since it was loaded or preempted
    read: int = 0  # positions in the draft model's KV


class _Fitting(NamedTuple):
    entries: list[Entry]
    beginning: list[tuple[_Slot, int]]  # and the blocks of their first chunk
    free_blocks: int  # left


class VllmEngine(KnowsFacts):
    """Implements Engine (services/worker/engine.py). `engine` is one of vllm/setup.py."""

    def __init__(
        self, engine: LLMEngine, facts: EngineFacts, adapters: Mapping[str, LoRARequest]
    ) -> None:
        self._engine, self._adapters = engine, adapters
        self._core = engine.engine_core.engine_core
        self._scheduler: PlannedScheduler = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._max_depth: int = self._scheduler.num_spec_tokens
        # the most tokens of a request with its drafts
        self._longest = longest(engine.vllm_config)
        self._slots: dict[Slot, _Slot] = {}
        self._loads = 0
        self._spare_blocks = self._pool.get_num_free_blocks() - facts.kv_blocks
        self._kept = KeptInVllm(self._pool, facts.block_tokens)
        folders = {name: adapter.lora_path for name, adapter in adapters.items()}
        self._moving = Moving(self._core, self._kept, facts.block_tokens, folders)
        self._facts = facts._replace(kv=self._moving.facts)

    def load(self, load: Load) -> None:
        self._check(load, self._slots)
        assert load.salt or not load.adapter, "an adapter's KV needs a salt of its own"
        if load.adapter and load.adapter not in self._adapters:
            raise RefusedError(f"this replica has no adapter {load.adapter}")
        if any(token >= self._facts.vocabulary for token in load.sampling.stop_token_ids):
            raise RefusedError(f"stop_token_ids beyond the model's {self._facts.vocabulary} tokens")
        self._loads += 1
        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": list(load.tokens)}
        if load.salt:
            prompt["cache_salt"] = load.salt.hex()
        try:
            params = sampling_params(
                load.sampling, max_model_len=self._facts.context_tokens, generated=load.generated
            )
            asked = self._engine.input_processor.process_inputs(
                f"{load.slot}-{self._loads}",
                prompt,
                params,
                ("generate",),
                arrival_time=time.time(),
                lora_request=self._adapters[load.adapter] if load.adapter else None,
            )
            asked.external_req_id = asked.request_id
            request, _ = self._core.preprocess_add_request(asked)
            if load.generated and request.use_structured_output:
                _advance_grammar(request, load.tokens[-load.generated :])
        except Exception as error:
            # vLLM's own errors, and any that a client's schema causes: only this request fails
            raise RefusedError(f"vLLM does not take this request: {error}") from error
        self._scheduler.park(request)
        asked_for = self._kept.ask(request.block_hashes, chain_of(load.tokens, load.salt))
        self._slots[load.slot] = _Slot(request, time.monotonic(), asked_for)

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        scheduler, states = self._scheduler, [self._slots[entry.slot] for entry in work]
        depths = self._with_room(work, states, self._depths(work, states, selection))
        drafted_s = self._draft(states, depths)
        entries = self._entries(work, states, depths)
        scheduler.obey([entry for entry in entries if entry.tokens])
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if not executed:
            time.sleep(NOTHING_S)
        output = {one.request_id: one for one in outputs[0].outputs} if outputs else {}
        done = []
        for entry, state in zip(entries, states, strict=True):
            done.append(self._landed(state, entry, output.get(state.request.request_id)))
        model_s = scheduler.ended_model_s - scheduler.began_model_s if executed else 0.0
        exec_s = time.monotonic() - began_s
        outside_s = exec_s - drafted_s - model_s
        prefixes = self._kept.changes()
        return Outcome(done, exec_s, outside_s, drafted_s, prefixes=prefixes)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        if state.request.status == RequestStatus.RUNNING:
            self._scheduler.preempt(state.request)
        state.computed, state.entered, state.read = 0, False, 0

    def release(self, slot: Slot) -> None:
        state = self._slots.pop(slot)
        self._kept.leave(state.prefixes)
        self._scheduler.finish_requests(state.request.request_id, RequestStatus.FINISHED_ABORTED)

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        return self._moving.lacking(tokens, salt)

    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return self._moving.take_out(digests, into)

    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        return self._moving.bring_in(names, payloads)

    def snapshot(self) -> EngineState:
        return EngineState(self._pool.get_num_free_blocks() - self._spare_blocks, list(self._slots))

    def restart(self) -> None:
        for slot in list(self._slots):
            self.release(slot)
        self._scheduler.reset_prefix_cache()
        self._kept.changes()  # they are told to nobody

    def close(self) -> None:
        """Prepares the end: vLLM's exit collects millions of objects twice, for ten seconds."""
        for slot in list(self._slots):
            self.release(slot)
        for owner in (self._engine, self._engine.engine_core):
            if (finalizer := getattr(owner, "_finalizer", None)) is not None:
                finalizer.detach()
        self._core.model_executor.shutdown()
        gc.freeze()

    # ------------------------------------------------------------ before a step

    def _depths(
        self, work: Sequence[Work], states: Sequence[_Slot], selection: Selection | None
    ) -> list[int]:
        """The number of drafts that each entry may have verified; 0 for all but decodes."""
        if selection is None or not self._max_depth:
            return [0] * len(work)
        most = [self._most(entry, state) for entry, state in zip(work, states, strict=True)]
        caps = np.array(most, dtype=np.int32) + np.int32(1)
        needed = np.array([entry.needed for entry in work], dtype=np.float32)
        depths: list[int] = depths_of(selection, caps, needed).tolist()
        return depths

    def _most(self, entry: Work, state: _Slot) -> int:
        """The most drafts that this entry may have verified, whatever its plan wants."""
        request = state.request
        decodes = (
            request.status == RequestStatus.RUNNING
            and not request.is_prefill_chunk
            and state.computed + 1 == request.num_tokens
        )
        if not decodes:
            return 0
        room: int = self._longest - request.num_tokens
        return max(0, min(entry.tokens - 1, self._max_depth, room))

    def _with_room(
        self, work: Sequence[Work], states: Sequence[_Slot], depths: list[int]
    ) -> list[int]:
        """The depths, 0 where the drafts would find no KV: the draft model is not run for them. How
        many drafts n-grams bring is known only once they were looked for, at hardly any cost.
        """
        if not any(depths) or not self._scheduler.num_lookahead_tokens:
            return depths
        return [entry.drafts for entry in self._fit(work, states, depths).entries]

    def _draft(self, states: Sequence[_Slot], depths: Sequence[int]) -> float:
        """Makes the drafts of this iteration. Returns the seconds it took; 0: none are wanted."""
        began_s = time.monotonic()
        wanted = [
            (self._unread(state), depth, state)
            for state, depth in zip(states, depths, strict=True)
            if depth
        ]
        if not wanted:
            return 0.0
        wanted.sort(key=lambda one: len(one[0].tokens))
        of_each_process = self._core.model_executor.collective_rpc(
            draft, args=([unread for unread, _, _ in wanted], max(depths))
        )
        drafts = [
            made[:depth] for made, (_, depth, _) in zip(of_each_process[0], wanted, strict=True)
        ]
        requests = [state.request for _, _, state in wanted]
        self._scheduler.update_draft_token_ids(
            DraftTokenIds([request.request_id for request in requests], drafts)
        )
        for _, _, state in wanted:
            state.read = state.request.num_tokens
        return time.monotonic() - began_s

    def _unread(self, state: _Slot) -> Unread:
        """A decode's tokens that the draft lacks, two at least; n-grams are found in the whole."""
        request = state.request
        keeps_kv = self._scheduler.num_lookahead_tokens > 0
        start = min(state.read, request.num_tokens - 2) if keeps_kv else 0
        [blocks] = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return Unread(request.all_token_ids[start:], start, blocks)

    def _entries(
        self, work: Sequence[Work], states: Sequence[_Slot], depths: Sequence[int]
    ) -> list[Entry]:
        """The part of the work that vLLM can do."""
        made = [
            min(depth, len(state.request.spec_token_ids))
            for state, depth in zip(states, depths, strict=True)
        ]
        entries, beginning, free_blocks = self._fit(work, states, made)
        # cached positions count as the request's own from here on, so only where there is room
        for state, blocks in beginning:
            more = self._blocks(state.request.num_tokens) - blocks
            state.request.skip_reading_prefix_cache = more > free_blocks
            free_blocks -= max(0, more) if more <= free_blocks else 0
        return entries

    def _fit(
        self, work: Sequence[Work], states: Sequence[_Slot], planned: Sequence[int]
    ) -> _Fitting:
        """The part of the work that finds room, with the planned drafts of each entry or without.
        An entry that finds none has 0 tokens: vLLM must never have to preempt on its own.
        """
        room_tokens = self._scheduler.max_num_scheduled_tokens
        free_blocks = self._facts.kv_blocks - sum(
            self._blocks(state.computed) for state in self._slots.values()
        )
        entries, beginning = [], list[tuple[_Slot, int]]()
        for wanted, state, drafts in zip(work, states, planned, strict=True):
            left = state.request.num_tokens - state.computed
            tokens = min(1 + drafts if left == 1 else min(wanted.tokens, left), room_tokens)
            blocks = self._blocks(state.computed + tokens) - self._blocks(state.computed)
            if drafts and blocks > free_blocks:  # the token that needs no drafts
                tokens, drafts = min(1, tokens), 0
                blocks = self._blocks(state.computed + tokens) - self._blocks(state.computed)
            if blocks > free_blocks:
                tokens = 0
            else:
                free_blocks -= blocks
                room_tokens -= tokens
                if tokens and not state.entered:
                    beginning.append((state, blocks))
            entries.append(Entry(state.request, tokens, min(drafts, max(0, tokens - 1))))
        return _Fitting(entries, beginning, free_blocks)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._facts.block_tokens)

    # ------------------------------------------------------------ after a step

    def _landed(self, state: _Slot, entry: Entry, output: Any) -> Done:
        request, before = state.request, state.computed
        if request.status == RequestStatus.FINISHED_ERROR:
            return Done(
                0,
                (),
                failed="vLLM gave the request up: its grammar cannot be compiled or does not "
                "allow its own output",
            )
        if not entry.tokens or not (
            request.status == RequestStatus.RUNNING or request.is_finished()
        ):
            if entry.tokens:
                self._scheduler.withdraw(request)
                if _compiling(request) and time.monotonic() - state.loaded_s > GRAMMAR_S:
                    return Done(
                        0, (), failed=f"its grammar was not compiled within {GRAMMAR_S:g} s"
                    )
            return Done(0, ())
        state.computed = request.num_computed_tokens
        tokens = () if output is None else output.new_token_ids
        if entry.drafts:  # the draft model has read them, but for the deepest
            state.read += min(len(tokens), entry.drafts) - 1
        cached = 0
        if not state.entered:
            state.entered = True
            cached = state.computed - self._scheduler.scheduled_tokens[request.request_id]
        likely = (
            ()
            if output is None or output.new_logprobs is None
            else _likely(output.new_logprobs, len(tokens), request)
        )
        return Done(state.computed - before, tokens, entry.drafts, likely, cached=cached)


def longest(config: Any) -> int:
    """The number of tokens that a request with its drafts may have, in both models."""
    target: int = config.model_config.max_model_len
    drafts = config.speculative_config
    model = None if drafts is None else drafts.draft_model_config
    # vLLM keeps the last position for the token that the target makes
    return target - 1 if model is None else min(target - 1, model.max_model_len)


def _likely(found: Any, n: int, request: Request) -> list[Likely]:
    """Log-probabilities of one token: vLLM's first column is its own, then the likeliest."""
    asked = request.sampling_params.num_logprobs
    ids, values = found.logprob_token_ids[:n], found.logprobs[:n]
    return [
        Likely(
            float(row[0]),
            [
                (int(token), float(value))
                for token, value in zip(names[1 : 1 + asked], row[1 : 1 + asked], strict=True)
            ],
        )
        for names, row in zip(ids, values, strict=True)
    ]


def _compiling(request: Request) -> bool:
    return (
        bool(request.use_structured_output)
        and not request.structured_output_request.is_grammar_ready
    )


def _advance_grammar(request: Request, generated: Sequence[int]) -> None:
    """Advances the grammar past earlier attempts' output. It waits until that is compiled."""
    until_s = time.monotonic() + GRAMMAR_S
    while _compiling(request):
        if time.monotonic() > until_s:
            raise ValueError(f"its grammar was not compiled within {GRAMMAR_S:g} s")
        time.sleep(NOTHING_S)
    if isinstance(request.structured_output_request.grammar, Exception):
        raise ValueError("its grammar cannot be compiled")
    if not request.structured_output_request.grammar.accept_tokens(
        request.request_id, list(generated)
    ):
        raise ValueError("what it has generated is not in its grammar")
