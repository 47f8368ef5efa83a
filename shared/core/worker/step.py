"""The data that passes between a WorkerCore and its shell: an iteration to run, the engine's
report, and the messages that may leave once the ack is stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.prefix import UNCHANGED, Changed
from shared.schemas import (
    AttemptOver,
    BatchPlan,
    Delta,
    PlanAck,
    Resume,
    Sampling,
    Selection,
    Status,
    TokenLogprob,
)
from shared.vocabulary import FinishReason, Slot

UNLIMITED = 1 << 30  # tokens


class Load(NamedTuple):
    """A request about to be computed from position 0: its prompt, followed by the `generated`
    tokens that it already has.

    `adapter`: one of the engine's names, or "" for the model itself. `resume`: the text so far;
    engines do not read it.
    """

    slot: Slot
    tokens: Sequence[int]  # prompt and output so far
    generated: int  # how many of the tokens are output
    sampling: Sampling
    # of the request's draws: position n draws from (seed, n), so a recomputed request goes on alike
    seed: int
    adapter: str = ""
    resume: Resume = Resume()
    salt: bytes = b""  # texts of other salts share no KV with it
    keep_s: float = 0.0  # that its KV stays longer than others once it has ended


class Work(NamedTuple):
    """One entry of an iteration: compute exactly the next `tokens` positions of the slot.

    `emits`: the chunk reaches the last known token, so one new token is sampled (more with drafts).
    At most `limit` of the new tokens are kept. The end of an output is found outside the engine,
    which does not read the fields from `limit` to `stops`. An engine with a prefix cache may find
    positions there, and then computes those that follow. An engine that keeps its own books may
    lack room, and then does nothing.
    """

    slot: Slot
    tokens: int
    emits: bool
    limit: int = UNLIMITED
    limit_reason: FinishReason = FinishReason.LENGTH  # the name of the end at `limit`
    stops: frozenset[int] = frozenset()  # tokens that end the output
    needed: float = 0.0  # tokens that keep its pace, for the selection of drafts


class Step(NamedTuple):
    """One iteration for the engine: preemptions, releases and closes, then loads, then work."""

    plan: BatchPlan | None
    preempts: Sequence[int]  # slots that lose their KV, and stay
    releases: Sequence[int]  # slots that go, with their text
    loads: Sequence[Load]
    work: Sequence[Work]
    selection: Selection | None
    skipped: Sequence[int]  # slots of entries whose request is gone


class TurnDone(NamedTuple):
    """The result of one work entry."""

    computed: int  # KV positions filled
    tokens: Sequence[int]
    text: str  # final: no later token changes it
    finish: FinishReason | None  # why the output ended here, if it did
    drafted: int = 0  # draft tokens verified
    logprobs: Sequence[TokenLogprob] = ()  # along `tokens`, or empty
    cached: int = 0  # computed positions that were found in a prefix cache
    message: str = ""  # why it failed
    refused: bool = False  # the engine never took the request

    @property
    def has_output(self) -> bool:
        """True if the client gets something: tokens, or the end."""
        return len(self.tokens) > 0 or self.finish is not None


class Ran(NamedTuple):
    """The engine's report of a step."""

    done: Sequence[TurnDone]
    exec_s: float
    outside_s: float = 0.0  # the part of `exec_s` not spent in the model, where that is known
    drafted_s: float = 0.0  # the part in which the draft model worked, where that is known
    shared_blocks: int = 0  # KV blocks that sharing saves the engine after the step
    draft_shared_blocks: int = 0  # the same in the draft model's own KV
    loaded_s: float = 0.0  # the part of `exec_s` for KV that came back from the host's memory
    prefixes: Changed = UNCHANGED  # where the engine's cache has them since the last step


class Timing(NamedTuple):
    """The instants of an iteration, and its duration."""

    started_unix_s: float
    ended_unix_s: float
    exec_s: float
    idle_s: float  # the engine waited for the plan
    outside_s: float  # the part of `exec_s` not spent in the model; 0: unknown
    late_s: float  # the time since the plan could begin that is neither `exec_s` nor `idle_s`
    decodes_s: float = 0.0  # the part of `exec_s` for decodes, where there are prefills too
    drafts_s: float = 0.0  # the part of `exec_s` for drafting
    drafted_s: float = 0.0  # the part of `exec_s` before the target's pass; 0: unknown
    loaded_s: float = 0.0  # the part of `exec_s` for KV that came back from the host's memory


class Outgoing(NamedTuple):
    """A client's event and the subject that it goes to."""

    subject: str
    json: bool
    event: Delta | Status


class Finished(NamedTuple):
    """All messages that an iteration, or a change between iterations, leads to. They leave after
    `ack` is in the log.
    """

    ack: PlanAck
    outgoing: Sequence[Outgoing]
    overs: Sequence[AttemptOver]
