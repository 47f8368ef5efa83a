"""What passes between a WorkerCore and its shell: an iteration to run, what it did, and all that
may leave once its ack is stored.
"""

from collections.abc import Sequence
from typing import NamedTuple

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
from shared.vocabulary import FinishReason


class TurnLoad(NamedTuple):
    """A request the engine does not have yet; its text begins here too."""

    slot: int
    tokens: Sequence[int]
    generated: int
    sampling: Sampling
    seed: int
    adapter: str
    resume: Resume


class TurnWork(NamedTuple):
    """Compute the next `tokens` positions; if `emits`, new tokens come, of which at most `limit`
    are kept.
    """

    slot: int
    tokens: int
    emits: bool
    limit: int
    limit_reason: FinishReason
    stops: frozenset[int]  # tokens that end the output


class Turn(NamedTuple):
    """One iteration, ready for the engine: preemptions, releases and closes, then loads, then
    work.
    """

    plan: BatchPlan | None
    preempts: Sequence[int]  # slots whose KV goes, and that stay
    releases: Sequence[int]  # slots that go, their text with them
    loads: Sequence[TurnLoad]
    work: Sequence[TurnWork]
    selection: Selection | None
    skipped: Sequence[int]


class TurnDone(NamedTuple):
    """What one work entry did. `text` is final text; `finish` if its output ended here; `logprobs`
    along `tokens`, or empty.

    `cached`: of the computed positions, those found in a prefix cache. `message`: why it failed;
    `refused`: the engine never took it.
    """

    computed: int
    tokens: Sequence[int]
    text: str
    finish: FinishReason | None
    drafted: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    cached: int = 0
    message: str = ""
    refused: bool = False


class Ran(NamedTuple):
    """A turn that is over. `outside_s`: of the engine's `exec_s`, what was not spent in the model,
    where that is known.
    """

    done: Sequence[TurnDone]
    exec_s: float
    outside_s: float = 0.0


class Outgoing(NamedTuple):
    """Where a client's event goes."""

    subject: str
    json: bool
    event: Delta | Status


class Finished(NamedTuple):
    """Everything an iteration (or a change between iterations) leads to. All of it leaves after
    `ack` is in the log.
    """

    ack: PlanAck
    outgoing: Sequence[Outgoing]
    overs: Sequence[AttemptOver]
