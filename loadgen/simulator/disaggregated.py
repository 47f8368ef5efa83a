"""DistServe's deployment: replicas that only prefill, replicas that only decode, and a link between
them.

The simplest model that is fair to it:
- *Prefill*: a request goes to the replica with the fewest prompt tokens waiting. Whole prompts run
  in order of arrival, as many together as PREFILL_TOKENS hold. A batch's end is the first token.
- *Link*: the decode replica with the fewest tokens to hold takes the KV of the prompt, one request
  at a time at the rate of the link, as soon as it has KV for the whole output. Until then the KV
  stays where it was prefilled, where later prompts wait for it.
- *Decode*: all requests of the replica in each iteration; nothing is ever preempted.

Output lengths are known, as the paper has it for all systems, and control takes no time.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from loadgen.simulator.deployment import ReplicaFacts
from loadgen.simulator.simulation import SimulationResult
from loadgen.simulator.traffic import Planned, Traffic, stored_as
from shared.core.record.judgement import missed
from shared.errors import ConfigError
from shared.measure import Measure
from shared.perf import profile_file as profiles
from shared.perf.shape import BatchShape
from shared.schemas import Verdict
from shared.vocabulary import FinishReason, Missed, ServiceClass, Slo

# DistServe section 4.3: prompts share a batch until they saturate the GPU.
PREFILL_TOKENS = 512
# NVLink between two A100s, in one direction.
NVLINK_BYTES_PER_S = 300e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The replicas of each kind, and the link into each decode replica."""

    prefill: int = 1
    decode: int = 1
    link_bytes_per_s: float = NVLINK_BYTES_PER_S


@dataclass(slots=True, eq=False)
class _Prefiller:
    kv_tokens: int  # free
    queue: deque[int] = field(default_factory=deque)
    waiting_tokens: int = 0
    busy: bool = False


@dataclass(slots=True, eq=False)
class _Decoder:
    kv_tokens: int  # free
    # prefilled requests whose KV is still to be taken, and where it is
    coming: deque[tuple[int, _Prefiller]] = field(default_factory=deque)
    to_hold_tokens: int = 0
    ready: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    taking: bool = False
    busy: bool = False


def simulate_disaggregated(
    traffic: Traffic, profile: str, facts: ReplicaFacts, split: Split
) -> SimulationResult:
    """Serve this traffic until all requests have ended. Raises ConfigError for requests in rounds,
    requests that think, and requests that no replica can hold.
    """
    return _Disaggregated(traffic, profile, facts, split).run()


class _Disaggregated:
    def __init__(self, traffic: Traffic, profile: str, facts: ReplicaFacts, split: Split) -> None:
        file = profiles.read(profile)
        self._profile = file.profile()
        facts = facts.resolved(file.kv_capacity_tokens)
        kv_tokens = facts.kv_blocks * facts.block_tokens
        token_bytes = file.kv_bytes_per_token * file.tensor_parallel
        self._link_s = token_bytes / split.link_bytes_per_s  # per token
        self._requests = traffic.requests
        for request in self._requests:
            if request.after is not None or request.thinking_tokens:
                raise ConfigError("rounds and thinking are not simulated on a disaggregated fleet")
            if request.prompt_tokens + request.output_tokens > kv_tokens:
                raise ConfigError(f"request {request.number} is longer than the KV of a replica")
        self._slos = [
            stored_as(
                request,
                traffic.tiers,
                self._profile,
                facts.context_tokens,
                traffic.most_tokens,
                0.0,
            )[0].slo
            for request in self._requests
        ]
        self._prefillers = [_Prefiller(kv_tokens) for _ in range(split.prefill)]
        self._decoders = [_Decoder(kv_tokens) for _ in range(split.decode)]
        self._times = [array("d") for _ in self._requests]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now_s = self._busy_s = 0.0
        self._iterations = 0

    def run(self) -> SimulationResult:
        began_s = time.perf_counter()
        for number, request in enumerate(self._requests):
            self._at(request.arrival_s, partial(self._arrive, number))
        events = 0
        while self._events:
            self._now_s, _, act = heappop(self._events)
            act()
            events += 1
        return SimulationResult(
            verdicts=[
                _verdict(*ended)
                for ended in zip(self._requests, self._slos, self._times, strict=True)
            ],
            slos=self._slos,
            token_unix_s=self._times,
            iterations=self._iterations,
            tokens=sum(map(len, self._times)),
            preempted=0,
            forced_preemptions=0,
            mispredicted_entries=0,
            offloaded=0,
            busy_s=self._busy_s,
            idle_s=0.0,
            drafted=0,
            accepted=0,
            verifications=0,
            simulated_s=self._now_s,
            wall_s=time.perf_counter() - began_s,
            events=events,
        )

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), act))

    def _iterate(self, shape: BatchShape, then: Callable[[], None]) -> None:
        seconds = self._profile.batch_s(shape)
        self._busy_s += seconds
        self._iterations += 1
        self._at(self._now_s + seconds, then)

    # ------------------------------------------------------------ prefill

    def _arrive(self, number: int) -> None:
        at = min(self._prefillers, key=lambda each: each.waiting_tokens)
        at.queue.append(number)
        at.waiting_tokens += self._requests[number].prompt_tokens
        self._prefill(at)

    def _prefill(self, at: _Prefiller) -> None:
        if at.busy:
            return
        batch, shape = list[int](), BatchShape()
        while at.queue:
            tokens = self._requests[at.queue[0]].prompt_tokens
            full = batch and shape.prefill_tokens + tokens > PREFILL_TOKENS
            if full or tokens > at.kv_tokens:
                break
            batch.append(at.queue.popleft())
            shape = shape.with_chunk(tokens, 0)
            at.kv_tokens -= tokens
            at.waiting_tokens -= tokens
        if batch:
            at.busy = True
            self._iterate(shape, partial(self._prefilled, at, batch))

    def _prefilled(self, at: _Prefiller, batch: Sequence[int]) -> None:
        at.busy = False
        for number in batch:
            self._times[number].append(self._now_s)
            if self._requests[number].output_tokens == 1:
                at.kv_tokens += self._requests[number].prompt_tokens
                continue
            to = min(self._decoders, key=lambda each: each.to_hold_tokens)
            to.coming.append((number, at))
            to.to_hold_tokens += self._holds(number)
            self._take(to)
        self._prefill(at)

    # ------------------------------------------------------------ the link

    def _take(self, to: _Decoder) -> None:
        if to.taking or not to.coming or self._holds(to.coming[0][0]) > to.kv_tokens:
            return
        number, at = to.coming.popleft()
        to.taking = True
        to.kv_tokens -= self._holds(number)
        seconds = self._requests[number].prompt_tokens * self._link_s
        self._at(self._now_s + seconds, partial(self._taken, to, number, at))

    def _taken(self, to: _Decoder, number: int, at: _Prefiller) -> None:
        to.taking = False
        at.kv_tokens += self._requests[number].prompt_tokens
        to.ready.append(number)
        self._take(to)
        self._prefill(at)
        self._decode(to)

    # ------------------------------------------------------------ decode

    def _decode(self, to: _Decoder) -> None:
        if to.busy:
            return
        to.running += to.ready
        to.ready = []
        if to.running:
            to.busy = True
            # the newest token of each is not in the KV yet
            context = sum(
                self._requests[number].prompt_tokens + len(self._times[number]) - 1
                for number in to.running
            )
            shape = BatchShape(decodes=len(to.running), decode_context=context)
            self._iterate(shape, partial(self._decoded, to))

    def _decoded(self, to: _Decoder) -> None:
        to.busy = False
        left = list[int]()
        for number in to.running:
            self._times[number].append(self._now_s)
            if len(self._times[number]) < self._requests[number].output_tokens:
                left.append(number)
            else:
                to.kv_tokens += self._holds(number)
                to.to_hold_tokens -= self._holds(number)
        to.running = left
        self._take(to)
        self._decode(to)

    def _holds(self, number: int) -> int:
        return self._requests[number].prompt_tokens + self._requests[number].output_tokens


def _verdict(request: Planned, slo: Slo, times: Sequence[float]) -> Verdict:
    measure = Measure.begin(slo, request.arrival_s)
    for at_s in times:
        measure = measure.emit(1, at_s, slo)
    broke = missed(measure, slo, request.arrival_s)
    gaps = max(len(times) - 1, 1)
    return Verdict(
        finish_reason=FinishReason.LENGTH,
        slo_met=broke is Missed.NOTHING,
        relegated=False,
        service_class=ServiceClass.STANDARD,
        prompt_tokens=request.prompt_tokens,
        output_tokens=len(times),
        attempts=1,
        ttft_s=times[0] - request.arrival_s,
        worst_tbt_s=measure.worst_tbt_s,
        mean_tpot_s=(times[-1] - times[0]) / gaps,
        ttlt_s=times[-1] - request.arrival_s,
        ended_unix_s=times[-1],
        missed=broke,
    )
