"""The interface of a worker's engine: load, execute, preempt, release, one call at a time. A real
engine has a process to itself; a simulated engine has a thread beside the event loop.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, Self

from shared.core.worker.step import Load, Work
from shared.errors import SlacklineError
from shared.perf.draft import DraftCost
from shared.prefix import UNCHANGED, Changed
from shared.schemas import Selection
from shared.vocabulary import Slot


class KvFacts(NamedTuple):
    """The KV that an engine gives to others and takes from them, in blocks. Engines of the same
    `layout` can use each other's. `move_s`: the seconds that a simulated token's KV takes to come;
    0: the bytes are real.
    """

    block_tokens: int
    block_bytes: int
    layout: str
    move_s: float = 0.0


class EngineFacts(NamedTuple):
    """The announced facts of an engine. `profile` is the name of a shipped profile, or a file."""

    engine: str
    model: str
    profile: str
    kv_blocks: int
    block_tokens: int
    context_tokens: int
    max_slots: int
    vocabulary: int
    eos_token_ids: frozenset[int]
    end_of_thinking: int | None = None  # the token; None: this model has none
    # the cost of the draft model, in fractions of the profile; 0: there is no draft model
    draft: DraftCost = 0.0
    # blocks of the draft model's own KV; 0: there is none, or it lies in the target's blocks
    draft_kv_blocks: int = 0
    # the longest text with drafts that the draft model reads; 0: `context_tokens`
    draft_context_tokens: int = 0
    # the most drafts of a chain, for an engine that verifies no trees; 0: it verifies trees
    longest_chain: int = 0
    host_kv_blocks: int = 0  # in the host's memory
    kv_load_s: float = 0.0  # for a token's KV to come back from there
    kv: KvFacts | None = None  # None: it does not move
    features: frozenset[str] = frozenset()  # of shared/features.py
    adapters: tuple[str, ...] = ()


class KvName(NamedTuple):
    """A full block of a text, by a hash of all tokens to its end. `mark`: the hash of the prefix
    that ends there (shared/prefix.py), if one does.
    """

    digest: bytes
    mark: int | None = None


class Lacking(NamedTuple):
    """The part of a text that an engine has, `tokens` from the first on, and what it lacks of the
    rest, in order, as far as it has room.
    """

    tokens: int
    names: Sequence[KvName]


class RefusedError(SlacklineError):
    """The engine never takes this request, which fails with this message; others go on."""


class Likely(NamedTuple):
    """Natural log-probabilities of a token and of the likeliest, before temperature and cuts."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()  # as many as Sampling.logprobs asks for, likeliest first


class Done(NamedTuple):
    """The result of an entry, parallel to the work: `computed` KV positions filled and kept,
    `cached` of them at no cost. `failed`: why this request, and no other, cannot go on.
    """

    computed: int
    tokens: Sequence[int]  # new output tokens
    drafted: int = 0
    logprobs: Sequence[Likely] = ()  # along `tokens`, if the request asks for them
    cached: int = 0
    failed: str = ""


class Outcome(NamedTuple):
    """The result of an iteration. `exec_s` is by a monotonic clock; a simulated engine may begin
    before the call. Parts of `exec_s`: `outside_s` not in the model or its sampling (if known),
    `drafted_s` in the draft model, before the target's pass; `loaded_s` for KV that came back from
    the host's memory. `unusual`: the engine made something ready that stays ready, so the next
    iteration like this one is faster. `prefixes`: where its cache has them since the last one.
    """

    done: Sequence[Done]
    exec_s: float
    outside_s: float = 0.0
    drafted_s: float = 0.0
    unusual: bool = False
    loaded_s: float = 0.0
    prefixes: Changed = UNCHANGED


class EngineState(NamedTuple):
    free_blocks: int
    slots: Sequence[int]  # loaded
    # blocks saved by sharing: each counts as often as slots hold it, less once
    shared_blocks: int = 0
    draft_shared_blocks: int = 0  # the same in the draft model's own KV


class KnowsFacts:
    """The part that all engines share: their facts, the check that a load is possible, and that KV
    does not move, unless they say how.
    """

    _facts: EngineFacts

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def drafting(self, cost: DraftCost) -> Self:
        """This engine, with the measured cost of its drafts among its facts."""
        self._facts = self._facts._replace(draft=cost)
        return self

    def named(self, model: str) -> Self:
        """This engine, its model under this name."""
        self._facts = self._facts._replace(model=model)
        return self

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        return Lacking(0, ())

    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        return [False] * len(digests)

    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        return [False] * len(names)

    def _check(self, load: Load, loaded: Collection[Slot]) -> None:
        assert load.slot not in loaded, f"slot {load.slot} is loaded already"
        assert len(loaded) < self._facts.max_slots, "no slot is free"
        assert 0 <= load.generated < len(load.tokens) <= self._facts.context_tokens, (
            f"slot {load.slot}: impossible length"
        )


class Engine(Protocol):
    @property
    def facts(self) -> EngineFacts: ...

    def named(self, model: str) -> Self: ...

    def load(self, load: Load) -> None:
        """Make a slot known; it takes no KV yet. After a RefusedError the slot is not known."""

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        """One forward pass over a mixed batch."""

    def preempt(self, slot: Slot) -> None:
        """Free the slot's KV at once. Its tokens stay, and are computed again from position 0."""

    def release(self, slot: Slot) -> None:
        """Free a slot and its KV at once."""

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        """The KV of this text, less the block of its last token, which is always computed. What is
        here counts as used now.
        """

    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        """Copy the KV of each block to its place; false: it is not here, or not yet."""

    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        """Keep this KV in free blocks, idle and the newest; false: there is no room. The next
        outcome tells of their prefixes.
        """

    def restart(self) -> None:
        """Free all slots and forget all prefixes: the next life of the worker knows of none."""

    def snapshot(self) -> EngineState: ...

    def close(self) -> None: ...
