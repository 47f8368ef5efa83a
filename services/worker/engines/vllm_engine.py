"""vLLM under our plans. The model, KV cache, sampler and grammars are vLLM's; the plan decides what
each iteration computes for which request.

One plan is one step of vLLM's engine core, whose scheduler is `PlannedScheduler`. The worker
decides where an output ends and which text of it is sent, as with every engine. Prefix caching is
vLLM's: a request that begins may find positions computed already, and is then further than its
entry planned.

Deviations from the seam: a request with a seed continues its draws alike after a preemption, but
not on another replica. Drafts for a step are made at the end of the step before, so a plan's first
speculating iteration may find none.
"""

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request, RequestStatus

from services.worker.engine import Done, EngineFacts, EngineState, Likely, Outcome, RefusedError
from services.worker.engines.vllm_drafts import depths_of
from services.worker.engines.vllm_sampling import sampling_params
from services.worker.engines.vllm_scheduler import Entry, PlannedScheduler
from shared.columns import unpack_list
from shared.core.turn import Load, Work
from shared.schemas import Selection
from shared.vocabulary import Slot

GRAMMAR_S = 10.0  # a request whose grammar takes longer to compile fails
# The duration of an iteration in which nothing could run; grammars are compiled meanwhile.
NOTHING_S = 0.002
# Drafts are still made for this many iterations after the last plan with drafts: iterations without
# decodes come between.
LINGER = 8


@dataclass(slots=True)
class _Slot:
    request: Request
    loaded_s: float  # monotonic
    computed: int = 0
    entered: bool = False  # it has had KV since it was loaded or preempted


class VllmEngine:
    """Implements services.worker.engine.Engine. `engine` is one of
    `services.worker.engines.vllm_setup`.
    """

    def __init__(
        self, engine: LLMEngine, facts: EngineFacts, adapters: Mapping[str, LoRARequest]
    ) -> None:
        self._engine, self._facts, self._adapters = engine, facts, adapters
        self._core = engine.engine_core.engine_core
        self._scheduler: PlannedScheduler = self._core.scheduler
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._max_depth: int = self._scheduler.num_spec_tokens
        self._depth, self._lingers = 0, 0
        self._slots: dict[Slot, _Slot] = {}
        self._loads = 0
        self._spare_blocks = self._pool.get_num_free_blocks() - facts.kv_blocks

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def drafting(self, step: float) -> "VllmEngine":
        """The same engine with the measured cost of a draft step, as a fraction of an iteration.

        A draft model computes its part of every iteration, drafts or none, so the profile holds
        what it reads.
        """
        self._facts = self._facts._replace(draft=(step, 0.0))
        return self

    def load(self, load: Load) -> None:
        assert load.slot not in self._slots, f"slot {load.slot} is loaded already"
        assert len(self._slots) < self._facts.max_slots, "no slot is free"
        assert 0 <= load.generated < len(load.tokens) <= self._facts.context_tokens, (
            f"slot {load.slot}: impossible length"
        )
        if load.adapter and load.adapter not in self._adapters:
            raise RefusedError(f"this replica has no adapter {load.adapter}")
        if any(token >= self._facts.vocabulary for token in load.sampling.stop_token_ids):
            raise RefusedError(f"stop_token_ids beyond the model's {self._facts.vocabulary} tokens")
        self._loads += 1
        try:
            params = sampling_params(
                load.sampling, max_model_len=self._facts.context_tokens, generated=load.generated
            )
            asked = self._engine.input_processor.process_inputs(
                f"{load.slot}-{self._loads}",
                {"type": "token", "prompt_token_ids": list(load.tokens)},
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
            # its own, and whatever else a client's schema brings up in a grammar compiler: of this
            # request alone
            raise RefusedError(f"vLLM does not take this request: {error}") from error
        self._scheduler.park(request)
        self._slots[load.slot] = _Slot(request, time.monotonic())

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        began_s = time.monotonic()
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        scheduler, states = self._scheduler, [self._slots[entry.slot] for entry in work]
        entries = self._entries(work, states, selection)
        scheduler.obey(
            [entry for entry in entries if entry.tokens], depth=self._next_depth(selection)
        )
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        if not executed:
            time.sleep(NOTHING_S)
        output = {one.request_id: one for one in outputs[0].outputs} if outputs else {}
        done = []
        for entry, state in zip(entries, states, strict=True):
            done.append(self._landed(state, entry, output.get(state.request.request_id)))
        model_s = scheduler.ended_model_s - scheduler.began_model_s if executed else 0.0
        ended_s = time.monotonic()
        return Outcome(done, ended_s - began_s, ended_s - began_s - model_s)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        if state.request.status == RequestStatus.RUNNING:
            self._scheduler.preempt(state.request)
        state.computed, state.entered = 0, False

    def release(self, slot: Slot) -> None:
        self._scheduler.finish_requests(
            self._slots.pop(slot).request.request_id, RequestStatus.FINISHED_ABORTED
        )

    def snapshot(self) -> EngineState:
        return EngineState(self._pool.get_num_free_blocks() - self._spare_blocks, list(self._slots))

    def close(self) -> None:
        """Prepares the end of the process. vLLM's own exit collects a heap of millions of objects
        twice, ten seconds on a busy machine.
        """
        for slot in list(self._slots):
            self.release(slot)
        for owner in (self._engine, self._engine.engine_core):
            if (finalizer := getattr(owner, "_finalizer", None)) is not None:
                finalizer.detach()
        self._core.model_executor.shutdown()
        gc.freeze()

    # ------------------------------------------------------------ before a step

    def _entries(
        self, work: Sequence[Work], states: Sequence[_Slot], selection: Selection | None
    ) -> list[Entry]:
        """The part of the work that vLLM can do. An entry without room has 0 tokens: vLLM must
        never have to preempt on its own.
        """
        depths = (
            [0] * len(work)
            if selection is None
            else depths_of(selection, [entry.tokens for entry in work])
        )
        room_tokens = self._scheduler.max_num_scheduled_tokens
        free_blocks = self._facts.kv_blocks - sum(
            self._blocks(state.computed) for state in self._slots.values()
        )
        entries, beginning = [], list[tuple[_Slot, int]]()
        for wanted, state, depth in zip(work, states, depths, strict=True):
            left = state.request.num_tokens - state.computed
            drafts = min(depth, len(state.request.spec_token_ids)) if left == 1 else 0
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
        # cached positions count as the request's own from here on, so only where there is room
        for state, blocks in beginning:
            more = self._blocks(state.request.num_tokens) - blocks
            state.request.skip_reading_prefix_cache = more > free_blocks
            free_blocks -= max(0, more) if more <= free_blocks else 0
        return entries

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._facts.block_tokens)

    def _next_depth(self, selection: Selection | None) -> int:
        """The number of drafts to make at the end of this step: as many as recent plans wanted."""
        wanted = 0 if selection is None else max(unpack_list(selection.depth), default=0)
        if wanted:
            self._depth, self._lingers = min(wanted, self._max_depth), LINGER
        elif self._lingers:
            self._lingers -= 1
        else:
            self._depth = 0
        return self._depth

    # ------------------------------------------------------------ after it

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


def _likely(found: Any, n: int, request: Request) -> list[Likely]:
    """Log-probabilities of one token. vLLM's first column is the sampled token; the requested
    number of likeliest tokens follows, likeliest first.
    """
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
    """Advances the grammar past the output of earlier attempts. It waits until the grammar is
    compiled, which is rare: only for a moved request.
    """
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
