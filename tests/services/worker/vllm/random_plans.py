"""Runs an engine by random plans and checks what it answers. This file does not import vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from services.worker.engine import Done, Likely, RefusedError
from services.worker.engines.vllm.engine import VllmEngine
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.prefix import salt_of
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot

GREEDY = Sampling(temperature=0.0)


class Asked(NamedTuple):
    """A request: its prompt, and the output that it wants."""

    prompt: Sequence[int]
    output_tokens: int  # wanted
    sampling: Sampling = GREEDY
    adapter: str = ""
    stops: frozenset[int] = frozenset()  # tokens that end it earlier, as the worker would


@dataclass(frozen=True, slots=True)
class Habits:
    """The kind of the plans: probabilities for each request and iteration, and bounds."""

    quota_tokens: int = 64  # of a chunk, at most
    skip: float = 0.3
    preempt: float = 0.03
    # given up in the middle; every second one comes back with what it has generated
    release: float = 0.0
    depth: int = 0  # of speculation, at most


@dataclass(slots=True)
class Held:
    """A loaded request, as a planner sees it."""

    index: int
    asked: Asked
    output: list[int]
    computed: int = 0
    entered: bool = False
    drafted: int = 0
    preemptions: int = 0  # of KV that it had, since it was loaded

    @property
    def left(self) -> int:
        return len(self.asked.prompt) + len(self.output) - self.computed

    @property
    def ended(self) -> bool:
        return len(self.output) >= self.asked.output_tokens or bool(
            self.output and self.output[-1] in self.asked.stops
        )


@dataclass(slots=True)
class Play:
    """One run of some requests under random plans. After every iteration the engine's answers and
    its count of KV blocks are compared with those that the plans imply.

    `caching`: the engine may find positions in its prefix cache. `drafts`: it may draft.
    """

    engine: VllmEngine
    rng: Random
    habits: Habits = Habits()
    caching: bool = False
    drafts: bool = False
    held: dict[int, Held] = field(default_factory=dict)
    iterations: int = 0
    refused_room: int = 0  # entries for which there was no KV
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    logprobs: dict[int, list[Likely]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)

    def run(self, asked: Sequence[Asked]) -> dict[int, list[int]]:
        """The output of each request, whole or until it was given up. Nothing stays loaded."""
        waiting = [Held(index, one, []) for index, one in enumerate(asked)]
        outputs: dict[int, list[int]] = {}
        idle = 0
        while waiting or self.held:
            self._load(waiting)
            for slot, held in list(self.held.items()):
                draw = self.rng.random()
                if held.ended or held.index in self.failed:
                    self._release(slot)
                    outputs[held.index] = held.output
                elif draw < self.habits.preempt:
                    self.preempt(slot)
                elif draw < self.habits.preempt + self.habits.release:
                    self._release(slot)
                    if self.rng.random() < 0.5:
                        waiting.append(Held(held.index, held.asked, held.output))
                    else:
                        outputs[held.index] = held.output
            before = sum(held.computed for held in self.held.values())
            self.step()
            idle = 0 if sum(held.computed for held in self.held.values()) > before else idle + 1
            # everybody waits for KV that another has: it is the plan's to choose a victim
            if idle >= 5 and self.held:
                self.preempt(self.rng.choice(sorted(self.held)))
            assert idle < 500, "nothing goes on"
        assert self.engine.snapshot() == (self.engine.facts.kv_blocks, [], 0, 0), (
            "blocks are leaked"
        )
        assert vllms_own_books(self.engine) == (0, 0, 0), "vLLM still knows a request"
        return outputs

    def _load(self, waiting: list[Held]) -> None:
        while waiting and len(self.held) < self.engine.facts.max_slots and self.rng.random() < 0.6:
            held = waiting.pop(self.rng.randrange(len(waiting)))
            slot = next(
                slot for slot in range(self.engine.facts.max_slots) if slot not in self.held
            )
            load(self.engine, slot, held.asked, held.output)
            self.held[slot] = held

    def preempt(self, slot: int) -> None:
        held = self.held[slot]
        self.engine.preempt(Slot(slot))
        held.preemptions += held.entered
        held.computed, held.entered = 0, False

    def _release(self, slot: int) -> None:
        self.engine.release(Slot(slot))
        del self.held[slot]

    def step(self) -> None:
        work, depths = list[Work](), list[int]()
        for slot in self.rng.sample(sorted(self.held), len(self.held)):
            held = self.held[slot]
            if held.ended or held.index in self.failed or self.rng.random() < self.habits.skip:
                continue
            depth = self.rng.randint(0, self.habits.depth) if held.left == 1 else 0
            tokens = (
                1 + depth
                if held.left == 1
                else min(held.left, self.rng.randint(1, self.habits.quota_tokens))
            )
            work.append(Work(Slot(slot), tokens, tokens >= held.left))
            depths.append(depth)
        self.iterate(work, depths)

    def iterate(self, work: Sequence[Work], depths: Sequence[int]) -> list[Done]:
        """Run one plan, check its results, and note them for the next plans."""
        selection = speculation(depths) if any(depths) else None
        outcome = self.engine.execute(work, selection)
        self.iterations += 1
        assert 0 <= outcome.outside_s <= outcome.exec_s
        assert len(outcome.done) == len(work)
        free = self.engine.facts.kv_blocks - sum(
            self._blocks(held.computed) for held in self.held.values()
        )
        for entry, done, depth in zip(work, outcome.done, depths, strict=True):
            held = self.held[entry.slot]
            if done.failed:
                assert (done.computed, len(done.tokens)) == (0, 0)
                self.failed[held.index] = done.failed
                continue
            drafts_were_there = held.left > 1 or done.computed == 0
            more = self._blocks(
                held.computed + (entry.tokens if drafts_were_there else 1 + done.drafted)
            ) - self._blocks(held.computed)
            if done.computed == 0:
                assert (len(done.tokens), done.drafted, done.cached) == (0, 0, 0)
                # A request that waits for its grammar to be compiled does nothing either.
                assert more > free or held.asked.sampling.structured is not None, (entry, free)
                self.refused_room += 1
                continue
            free -= more
            self._enter(held, entry, done, depth)
        if not self.caching and not self.drafts:
            assert free == self.engine.facts.kv_blocks - sum(
                self._blocks(held.computed) for held in self.held.values()
            )
        self._balance()
        return list(outcome.done)

    def _enter(self, held: Held, entry: Work, done: Done, depth: int) -> None:
        left = held.left
        if left == 1 and not done.cached:
            assert done.drafted <= depth
            assert 1 <= done.computed == len(done.tokens) <= 1 + done.drafted
        else:
            assert done.drafted == 0
            assert done.cached == 0 or (self.caching and not held.entered)
            assert 1 <= done.computed - done.cached <= entry.tokens
            assert done.computed >= entry.tokens, "less than asked for"
            assert done.computed == entry.tokens or done.cached
            assert len(done.tokens) == (done.computed == left)
        held.entered = True
        held.computed += done.computed
        held.output += done.tokens
        assert held.left >= 1
        self.cached_tokens += done.cached
        self.drafted_tokens += done.drafted
        self.accepted_tokens += len(done.tokens) - 1 if done.drafted else 0
        asks = held.asked.sampling.logprobs is not None
        assert len(done.logprobs) == (len(done.tokens) if asks else 0)
        if asks:
            self.logprobs.setdefault(held.index, []).extend(done.logprobs)

    def _balance(self) -> None:
        state = self.engine.snapshot()
        assert sorted(state.slots) == sorted(self.held)
        booked = self.engine.facts.kv_blocks - sum(
            self._blocks(held.computed) for held in self.held.values()
        )
        if self.caching:
            assert state.free_blocks >= booked  # blocks that are shared count once
        elif self.drafts:
            # those taken for drafts are beside the books
            assert booked - self.engine._spare_blocks <= state.free_blocks <= booked
        else:
            assert state.free_blocks == booked
        made = {
            request.request_id: request.num_preemptions
            for request in self.engine._scheduler.requests.values()
        }
        asked = {
            self.engine._slots[Slot(slot)].request.request_id: held.preemptions
            for slot, held in self.held.items()
        }
        assert {name: n for name, n in made.items() if name in asked} == {
            name: n for name, n in asked.items() if name in made
        }, "vLLM preempts on its own"

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.engine.facts.block_tokens)


def load(
    engine: VllmEngine, slot: int, asked: Asked, output: Sequence[int] = (), salt: bytes = b""
) -> None:
    tokens = [*asked.prompt, *output]
    salt = salt or salt_of("", asked.adapter)
    load = Load(Slot(slot), tokens, len(output), asked.sampling, 1, asked.adapter, salt=salt)
    engine.load(load)


def refusal(engine: VllmEngine, asked: Asked, output: Sequence[int] = ()) -> str:
    """The reason why a request is refused; "" if it is taken (and released again)."""
    try:
        load(engine, 0, asked, output)
    except RefusedError as error:
        return str(error)
    engine.release(Slot(0))
    return ""


def speculation(depths: Sequence[int]) -> Selection:
    n = len(depths)
    return Selection(method="chain", depth=pack(depths), width=pack([1] * n), budget_tokens=1 << 20)


def vllms_own_books(engine: VllmEngine) -> tuple[int, int, int]:
    """The number of requests that vLLM's scheduler knows, runs, and keeps waiting."""
    scheduler = engine._scheduler
    return len(scheduler.requests), *scheduler.get_request_counts()
