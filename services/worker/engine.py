"""The seam between a worker and whatever runs the model: load, execute, release, snapshot.

Calls never overlap, and come from threads beside the event loop: one engine thread while requests are served.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot


class EngineFacts(NamedTuple):
    """What a worker announces of its engine. `profile` names the shipped profile (or file) that predicts it best."""

    engine: str
    model: str
    profile: str
    kv_blocks: int
    block_tokens: int
    context_tokens: int
    max_slots: int
    vocabulary: int
    eos_token_ids: frozenset[int]
    draft: float = 0.0  # what an iteration of its draft model takes, as a fraction of the profile; 0: it has none


class Load(NamedTuple):
    """A request about to be computed from position 0: its prompt, followed by the `generated` tokens it already has."""

    slot: Slot
    tokens: Sequence[int]
    generated: int
    sampling: Sampling
    seed: int  # of this request; position n draws from (seed, n), so that a recomputed request goes on alike


class Work(NamedTuple):
    """One entry of an iteration: compute the next `tokens` positions of the slot, exactly.

    `emits`: the chunk reaches the last known token, so one new token is sampled (more with drafts).
    """

    slot: Slot
    tokens: int
    emits: bool


class Likely(NamedTuple):
    """Natural log-probabilities under the model, before temperature and cuts: of one output token, and of the likeliest ones."""

    logprob: float
    top: Sequence[tuple[int, float]] = ()  # as many as Sampling.logprobs asks for, likeliest first


class Done(NamedTuple):
    """What one entry did; parallel to the work. `computed` KV positions were filled and kept."""

    computed: int
    tokens: Sequence[int]  # new output tokens
    drafted: int = 0
    logprobs: Sequence[Likely] = ()  # along `tokens`, if the request asks for them


class Outcome(NamedTuple):
    """`exec_s` by a monotonic clock; a simulated engine may have begun at an instant before it was called."""

    done: Sequence[Done]
    exec_s: float


class EngineState(NamedTuple):
    free_blocks: int
    slots: Sequence[int]  # loaded


class Engine(Protocol):
    @property
    def facts(self) -> EngineFacts: ...

    def load(self, load: Load) -> None:
        """Make a slot known. KV is taken as positions are computed."""

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        """One forward pass over a mixed batch."""

    def release(self, slot: Slot) -> None:
        """Free a slot and its KV at once. A preempted request is released, and loaded again with what it generated."""

    def snapshot(self) -> EngineState: ...

    def close(self) -> None: ...
