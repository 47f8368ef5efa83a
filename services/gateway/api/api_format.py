"""The interfaces of an answer in each API: a writer for each choice, and a frame around them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from services.gateway.http.envelope import Problem
from services.gateway.http.json_bytes import encode
from shared.schemas import Delta, FirstMissed, Thinking, TokenLogprob, Verdict
from shared.vocabulary import Missed

DONE = b"data: [DONE]\n\n"


class Output:
    """The output of one choice so far."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []  # along `tokens`, or empty
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def take(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self._texts.append(delta.text)


class ChoiceWriter(Protocol):
    """Writes one choice, whole or chunk by chunk. A chunk is a choice with only its new part."""

    def whole(self, output: Output, finish_reason: str) -> Struct: ...

    def open(self) -> Sequence[Struct]:
        """The chunks of a choice that come before the first text of any choice."""

    def say(self, delta: Delta) -> Sequence[Struct]: ...

    def close(self, finish_reason: str) -> Sequence[Struct]: ...


class PromptDetails(Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionDetails(Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts. The cache's are known at the end of a choice, and `completion_tokens_details`
    where its SLO names a pace for thinking.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails(cached_tokens=0)
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class ChoiceVerdict(Struct, frozen=True, kw_only=True):
    """The verdict on one choice, without what only operators ask for. Times are in seconds."""

    slo_met: bool
    missed: Missed
    relegated: bool
    ttft_s: float | None
    mean_tpot_s: float | None
    worst_tbt_s: float | None
    ttlt_s: float | None
    first_missed: FirstMissed | None
    task_left_s: float | None


def told(verdict: Verdict) -> ChoiceVerdict:
    """The part of a verdict that the client of HTTP is told."""
    return ChoiceVerdict(
        **{name: getattr(verdict, name) for name in ChoiceVerdict.__struct_fields__}
    )


class Reply(Struct, frozen=True, kw_only=True):
    """A whole answer, or a chunk of a stream. `service_tier`: the tier used, as far as is known.
    `verdicts`: where asked for, once all choices have ended.
    """

    id: str
    object: str
    created: int  # unix seconds
    model: str
    choices: Sequence[Struct]
    service_tier: str
    usage: Usage | UnsetType | None = UNSET
    verdicts: Sequence[ChoiceVerdict] | UnsetType = UNSET


class Head(NamedTuple):
    """The facts of one answer that its frame repeats."""

    request_id: str
    created: int  # unix seconds
    include_usage: bool
    usage_so_far: bool  # with every chunk as well


class SoFar(Protocol):
    """The facts of an answer that are known by now."""

    @property
    def model(self) -> str:
        """The model that answers; empty while no replica is heard and none was named."""

    @property
    def service_tier(self) -> str:
        """The tier actually used."""

    @property
    def usage(self) -> Usage: ...

    @property
    def ended_unix_s(self) -> int:
        """The second in which the newest verdict came."""

    @property
    def told_verdicts(self) -> Sequence[ChoiceVerdict] | UnsetType:
        """One for each choice; unset if the client asked for none, or a choice has not ended."""


class Frame(Protocol):
    """Writes one answer around its choices: as one JSON body, or as a stream."""

    def whole(self, choices: Sequence[Struct], so_far: SoFar) -> bytes: ...

    def refusal(self, problem: Problem) -> bytes:
        """The body in place of an answer that fails before it begins."""

    def chunks(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        """The part of a stream for these new parts of choices."""

    def end(self, so_far: SoFar) -> bytes:
        """The last part of a stream that ends well."""

    def failure(self, problem: Problem, so_far: SoFar) -> bytes:
        """The last part of a stream that fails."""


class ApiFormat(Protocol):
    """The form of an answer in one API."""

    @property
    def operation(self) -> str:
        """The operation's name in OpenTelemetry."""

    def frame(self, head: Head) -> Frame: ...

    def writer(
        self, index: int, request_id: str, tool_format: str, thinking: Thinking | None
    ) -> ChoiceWriter:
        """`request_id`: of the whole answer. `tool_format`: how its model writes calls of tools.
        `thinking`: the marks of it in the choice's text.
        """


class ReplyFrame:
    """Writes chats and completions around their choices. Implements Frame."""

    def __init__(self, head: Head, id_prefix: str, whole_object: str, chunk_object: str) -> None:
        self._head = head
        self._id = f"{id_prefix}-{head.request_id}"
        self._whole_object, self._chunk_object = whole_object, chunk_object

    def whole(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        return encode(self._reply(self._whole_object, choices, so_far, so_far.usage))

    def refusal(self, problem: Problem) -> bytes:
        return problem.body()

    def chunks(self, choices: Sequence[Struct], so_far: SoFar) -> bytes:
        usage: Usage | UnsetType | None = None if self._head.include_usage else UNSET
        if self._head.usage_so_far:
            usage = so_far.usage
        return b"".join([self._chunk([choice], so_far, usage) for choice in choices])

    def end(self, so_far: SoFar) -> bytes:
        usage = self._chunk([], so_far, so_far.usage) if self._head.include_usage else b""
        return usage + DONE

    def failure(self, problem: Problem, so_far: SoFar) -> bytes:
        return b"data: " + problem.body() + b"\n\n"

    def _chunk(
        self, choices: Sequence[Struct], so_far: SoFar, usage: Usage | UnsetType | None
    ) -> bytes:
        reply = self._reply(self._chunk_object, choices, so_far, usage)
        return b"data: " + encode(reply) + b"\n\n"

    def _reply(
        self, kind: str, choices: Sequence[Struct], so_far: SoFar, usage: Usage | UnsetType | None
    ) -> Reply:
        return Reply(
            id=self._id,
            object=kind,
            created=self._head.created,
            model=so_far.model,
            choices=choices,
            service_tier=so_far.service_tier,
            usage=usage,
            verdicts=so_far.told_verdicts,
        )
