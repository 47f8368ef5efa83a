"""Counts what the engine of a worker does, and exports the counts as metrics."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine import EngineFacts
from shared.core.record.verdict import GOOD_ENDS
from shared.core.worker.draft_yields import POSITIONS
from shared.core.worker.step import Ran, Step
from shared.perf.profile_file import ProfileFile
from shared.placing.outcomes import kept_trace
from shared.schemas import AttemptOver, Record
from shared.telemetry import conventions as names
from shared.telemetry.instruments import Counter, Gauge, Histogram, Registry
from shared.vocabulary import ReplicaId, RequestKey


@dataclass(slots=True)
class _Held:
    """The times of a request that is held here; 0: not yet."""

    key: RequestKey
    arrived_unix_s: float
    trace_id: str
    moved: bool  # it has tokens from elsewhere
    last_unix_s: float  # of its newest token
    began_unix_s: float = 0.0  # of its first iteration


class WorkerMetrics:
    """One object for the process: it stays when the worker is fenced and begins again. Each family
    has the label `replica`, and under vLLM's names `model_name` as well.
    """

    def __init__(
        self, registry: Registry, replica: ReplicaId, facts: EngineFacts, fitted: ProfileFile | None
    ) -> None:
        self._made, self._replica, self._model = registry, replica, facts.model
        self._blocks = max(1, facts.kv_blocks)
        self._held: dict[int, _Held] = {}  # by slot
        self._slots: dict[RequestKey, int] = {}
        self._newest_unix_s = -1.0  # the end of the newest iteration
        iteration, step = names.ITERATION_BUCKETS_S, names.STEP_BUCKETS_S
        self._iterations = self._histogram(
            names.ITERATION, "The engine's time per iteration.", iteration
        )
        self._predicted = self._histogram(
            names.PREDICTED_ITERATION,
            "The time that the plan of an iteration predicted.",
            iteration,
        )
        self._outside = self._histogram(
            names.OUTSIDE, "Of an iteration, the time not spent in the model.", step
        )
        self._bubbles = self._histogram(
            names.BUBBLE, "Idle time of the engine before an iteration.", step
        )
        self._chunks = self._histogram(
            names.CHUNK_TOKENS, "Prefill tokens of an iteration that has any.", names.TOKENS_BUCKETS
        )
        self._computed = self._counter(
            names.COMPUTED_TOKENS, "Positions computed, recomputed ones included."
        )
        self._cached = self._counter(
            names.CACHED_TOKENS, "Positions found in a prefix cache instead."
        )
        self._requests = self._gauge(names.HELD_REQUESTS, "Requests held.")
        self._free = self._gauge(names.KV_FREE_BLOCKS, "KV blocks that no request has.")
        self._fetched = self._counter(
            names.KV_FETCHED,
            "Positions of requests from other replicas that are not computed again.",
        )
        self._fetching = self._counter(
            names.KV_FETCH_TIME, "Seconds for which holds waited for KV of other replicas."
        )
        self._usage = self._gauge(
            names.KV_CACHE_USAGE, "Share of the KV blocks in use, from 0 to 1."
        )
        self._running = self._gauge(names.REQUESTS_RUNNING, "Requests in the newest iteration.")
        self._waiting = self._gauge(names.REQUESTS_WAITING, "Requests held that are not in it.")
        self._prompt = self._counter(names.PROMPT_TOKENS, "Tokens of prefill chunks computed.")
        self._generated = self._counter(names.GENERATION_TOKENS, "Tokens generated.")
        self._preempted = self._counter(names.PREEMPTIONS, "Requests whose KV was dropped.")
        self._queries = self._counter(
            names.PREFIX_QUERIES, "Prompt positions asked of a prefix cache."
        )
        self._hits = self._counter(names.PREFIX_HITS, "Of these, the positions found.")
        self._tokens = self._histogram(
            names.ITERATION_TOKENS, "Positions computed in an iteration.", names.TOKENS_BUCKETS
        )
        name, text = names.INTER_TOKEN_LATENCY, "Between two tokens of a request."
        labels = self._labels(name)
        gaps = registry.histogram(name, text, names.TPOT_BUCKETS_S, [*labels])
        registry.alias(names.OLD_INTER_TOKEN_LATENCY, gaps)
        self._gaps = gaps.labels(*labels.values())
        ttft, lasting = names.TTFT_BUCKETS_S, names.DURATION_BUCKETS_S
        self._queued = self._histogram(
            names.QUEUE_TIME, "Arrival to a request's first iteration.", ttft
        )
        self._prefill = self._histogram(names.PREFILL_TIME, "First iteration to first token.", ttft)
        self._decode = self._histogram(names.DECODE_TIME, "First token to last token.", lasting)
        self._inference = self._histogram(
            names.INFERENCE_TIME, "First iteration to last token.", lasting
        )
        self._verifications = self._counter(
            names.DRAFTS, "Verifications of drafts, one for each request and iteration."
        )
        self._drafted = self._counter(names.DRAFT_TOKENS, "Draft tokens verified.")
        self._accepted = self._counter(names.ACCEPTED_TOKENS, "Draft tokens accepted.")
        text = "Draft tokens accepted, by their position behind the newest token."
        per_position = registry.counter(names.ACCEPTED_PER_POSITION, text, [*labels, "position"])
        self._accepted_at = [
            per_position.labels(*labels.values(), str(n)) for n in range(POSITIONS)
        ]
        if fitted is not None:
            self._show_fit(fitted)

    def fetched(self, tokens: int, seconds: float) -> None:
        """KV of so many positions is here after a hold waited so long for it."""
        self._fetched.add(tokens)
        self._fetching.add(seconds)

    def held(self, slot: int, record: Record) -> None:
        """The worker has taken this request in."""
        measure = record.resume.measure
        self._slots[record.key] = slot
        self._held[slot] = _Held(
            record.key,
            record.arrived_unix_s,
            kept_trace(record.traceparent),
            measure.tokens > 0,
            measure.last_unix_s,
        )

    def forget(self) -> None:
        """The worker holds nothing any more."""
        self._held.clear()
        self._slots.clear()

    def ran(
        self, step: Step, ran: Ran, idle_s: float, began_unix_s: float, ended_unix_s: float
    ) -> None:
        """One iteration, with work."""
        self._iterations.observe(ran.exec_s)
        if step.plan is not None:
            self._predicted.observe(step.plan.predicted_s)
        self._outside.observe(ran.outside_s)
        self._bubbles.observe(idle_s)
        self._preempted.add(len(step.preempts))
        for load in step.loads:
            self._begin(load.slot, began_unix_s)
        get, newest, usual = self._held.get, self._newest_unix_s, 0
        computed = cached = prompt = generated = sought = 0
        for work, did in zip(step.work, ran.done, strict=True):
            filled, emitted, found = did.computed, len(did.tokens), did.cached
            computed += filled
            cached += found
            # a decode makes a token of each position; what finds something cached begins
            if (found or filled > emitted) and not did.drafted:
                prompt += filled - found
                sought += filled
            if not emitted:
                continue
            generated += emitted
            request = get(work.slot)
            if request is None:
                continue
            before, request.last_unix_s = request.last_unix_s, ended_unix_s
            if before == newest:  # of the iteration before this
                usual += 1
            elif before:
                self._gaps.observe(ended_unix_s - before)
            elif not request.moved:
                self._prefill.observe(ended_unix_s - request.began_unix_s, 1, request.trace_id)
            if emitted > 1:  # drafts that were accepted come together
                self._gaps.observe(0.0, emitted - 1)
        if usual:
            self._gaps.observe(ended_unix_s - newest, usual)
        self._newest_unix_s = ended_unix_s
        computed -= cached
        self._computed.add(computed)
        self._cached.add(cached)
        self._prompt.add(prompt)
        self._generated.add(generated)
        self._queries.add(sought)
        self._hits.add(cached)
        self._tokens.observe(computed)
        if prompt:
            self._chunks.observe(prompt)
        verified = [did for did in ran.done if did.drafted]
        if verified:
            self._verifications.add(len(verified))
            self._drafted.add(sum(did.drafted for did in verified))
            accepted = [did.computed - 1 for did in verified]
            self._accepted.add(sum(accepted))
            for position in range(min(max(accepted), POSITIONS)):
                self._accepted_at[position].add(sum(n > position for n in accepted))

    def over(self, overs: Sequence[AttemptOver]) -> None:
        """Forget attempts that are over, and export the decode times of those that ended well."""
        for over in overs:
            slot = self._slots.pop(over.key, None)
            request = None if slot is None else self._held.get(slot)
            if slot is None or request is None or request.key != over.key:
                continue  # a resync has given its slot to another already
            del self._held[slot]
            measure = over.resume.measure
            if over.why not in GOOD_ENDS or not request.began_unix_s:
                continue
            self._decode.observe(measure.last_unix_s - measure.first_unix_s, 1, request.trace_id)
            self._inference.observe(measure.last_unix_s - request.began_unix_s, 1, request.trace_id)

    def holds(self, held: int, running: int, free_blocks: int) -> None:
        self._requests.set(held)
        self._running.set(min(running, held))
        self._waiting.set(max(0, held - running))
        self._free.set(free_blocks)
        self._usage.set(1 - free_blocks / self._blocks)

    def _begin(self, slot: int, at_unix_s: float) -> None:
        """The first iteration of a request; one that is computed again has begun already."""
        request = self._held.get(slot)
        if request is None or request.began_unix_s:
            return
        request.began_unix_s = at_unix_s
        if not request.moved:
            self._queued.observe(max(at_unix_s - request.arrived_unix_s, 0.0), 1, request.trace_id)

    def _show_fit(self, fitted: ProfileFile) -> None:
        """Export the error of the fitted profile on the measurements that it was fitted to."""
        error = fitted.error
        off = self._made.gauge(
            names.FIT_ERROR,
            "Mean |predicted - measured| / measured of the profile fitted at the start.",
            ("replica", "regime"),
        )
        errors = {
            "all": error.mape,
            "decode_only": error.mape_decode_only,
            "mixed": error.mape_mixed,
            "prefill_only": error.mape_prefill_only,
        }
        for regime, mape in errors.items():
            if mape is not None:
                off.labels(self._replica, regime).set(mape)

    def _labels(self, name: str) -> dict[str, str]:
        """The labels of a family: `replica`, and `model_name` on families with vLLM's names."""
        model = {"model_name": self._model} if name.startswith("vllm:") else {}
        return {**model, "replica": self._replica}

    def _counter(self, name: str, text: str) -> Counter:
        labels = self._labels(name)
        return self._made.counter(name, text, [*labels]).labels(*labels.values())

    def _gauge(self, name: str, text: str) -> Gauge:
        labels = self._labels(name)
        return self._made.gauge(name, text, [*labels]).labels(*labels.values())

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        labels = self._labels(name)
        return self._made.histogram(name, text, bounds, [*labels]).labels(*labels.values())
