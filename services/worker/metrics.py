"""The counters of a worker."""

from services.worker.engine import EngineFacts
from shared.core.turn import Ran, Turn
from shared.perf.profile_file import ProfileFile
from shared.process import conventions as names
from shared.process.instruments import Registry


class WorkerMetrics:
    """The counters of a worker over all its incarnations, and the error of its fitted profile on
    the measurements that it was fitted to.
    """

    def __init__(self, registry: Registry, facts: EngineFacts, fitted: ProfileFile | None) -> None:
        model, labels, made = facts.model, ("model_name",), registry
        self._blocks = max(1, facts.kv_blocks)
        self._iterations = made.histogram(
            names.ITERATION, "The engine's time per iteration.", names.ITERATION_BUCKETS_S
        ).labels()
        self._outside = made.histogram(
            names.OUTSIDE, "Of an iteration, the time not spent in the model.", names.STEP_BUCKETS_S
        ).labels()
        self._bubbles = made.histogram(
            names.BUBBLE, "Idle time of the engine before an iteration.", names.STEP_BUCKETS_S
        ).labels()
        self._computed = made.counter(
            names.COMPUTED_TOKENS, "Positions computed, recomputed ones included."
        ).labels()
        self._cached = made.counter(
            names.CACHED_TOKENS, "Positions found in a prefix cache instead."
        ).labels()
        self._held = made.gauge(names.HELD_REQUESTS, "Requests held.").labels()
        self._free = made.gauge(names.KV_FREE_BLOCKS, "KV blocks that no request has.").labels()
        self._usage = made.gauge(
            names.KV_CACHE_USAGE, "Share of the KV blocks in use, from 0 to 1.", labels
        ).labels(model)
        self._running = made.gauge(
            names.REQUESTS_RUNNING, "Requests in the newest iteration.", labels
        ).labels(model)
        self._waiting = made.gauge(
            names.REQUESTS_WAITING, "Requests held that are not in it.", labels
        ).labels(model)
        self._prompt = made.counter(
            names.PROMPT_TOKENS, "Tokens of prefill chunks computed.", labels
        ).labels(model)
        self._generated = made.counter(names.GENERATION_TOKENS, "Tokens generated.", labels).labels(
            model
        )
        self._verifications = made.counter(
            names.DRAFTS, "Verifications of drafts, one for each request and iteration.", labels
        ).labels(model)
        self._drafted = made.counter(names.DRAFT_TOKENS, "Draft tokens verified.", labels).labels(
            model
        )
        self._accepted = made.counter(
            names.ACCEPTED_TOKENS, "Draft tokens accepted.", labels
        ).labels(model)
        if fitted is not None:
            error = fitted.error
            off = made.gauge(
                names.FIT_ERROR,
                "Mean |predicted - measured| / measured of the profile fitted at the start.",
                ("regime",),
            )
            errors = {
                "all": error.mape,
                "decode_only": error.mape_decode_only,
                "mixed": error.mape_mixed,
            }
            for regime, mape in (errors | {"prefill_only": error.mape_prefill_only}).items():
                if mape is not None:
                    off.labels(regime).set(mape)

    def ran(self, turn: Turn, ran: Ran, idle_s: float) -> None:
        self._iterations.observe(ran.exec_s)
        self._outside.observe(ran.outside_s)
        self._bubbles.observe(idle_s)
        chunks = [
            did
            for did in ran.done
            if not did.drafted and did.computed - did.cached > len(did.tokens)
        ]
        cached = sum(did.cached for did in ran.done)
        self._cached.add(cached)
        self._computed.add(sum(did.computed for did in ran.done) - cached)
        self._prompt.add(sum(did.computed - did.cached for did in chunks))
        self._generated.add(sum(len(did.tokens) for did in ran.done))
        verified = [did for did in ran.done if did.drafted]
        if verified:
            self._verifications.add(len(verified))
            self._drafted.add(sum(did.drafted for did in verified))
            self._accepted.add(sum(did.computed - 1 for did in verified))

    def holds(self, held: int, running: int, free_blocks: int) -> None:
        self._held.set(held)
        self._running.set(min(running, held))
        self._waiting.set(max(0, held - running))
        self._free.set(free_blocks)
        self._usage.set(1 - free_blocks / self._blocks)
