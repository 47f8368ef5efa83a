"""Measures a worker's engine for a few seconds and fits the profile that the worker announces.

Requests are prefilled in chunks of every size (alone, several, beside decodes), then decode, greedy
and sampled mixed. Some verify drafts; the time of the draft itself is left out. Rounds of batches
are shuffled, so that a slow moment of the machine falls on all kinds alike. The time is bounded,
not the number of batches: none may take a large part of it, and a slow engine gets smaller ones.
Iterations in which the engine made something ready do not count; they may take as long again.
"""

import math
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np
import structlog

from services.worker.engine import Engine
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.perf.fitting import LEAST, Timed, fit
from shared.perf.profile_file import ProfileFile
from shared.perf.shape import BatchShape
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot

log = structlog.get_logger()

DECODES = (1, 1, 2, 4, 8, 16, 24, 32)  # of the decode-only batches of a round
# chunks, tokens of all together
PREFILLS = ((1, 4), (1, 16), (1, 64), (1, 256), (1, 1024), (2, 32), (3, 96), (2, 512), (4, 256))
# decodes, chunks, tokens of all chunks together
MIXES = (
    (1, 1, 32),
    (4, 1, 128),
    (16, 1, 64),
    (32, 1, 256),
    (8, 2, 512),
    (2, 1, 16),
    (24, 2, 32),
    (12, 3, 192),
)
# decodes, drafts that each verifies, of an engine with a draft model
VERIFICATIONS = ((1, 1), (1, 3), (4, 2), (8, 1), (8, 3), (16, 2), (24, 1), (32, 2))
RESIDENTS = max(DECODES)
ARRIVING = 6  # requests whose prefill is under way
SHORTEST_TOKENS, LONGEST_TOKENS = 8, 1024  # of a prompt
FIRST_TOKENS = 64  # of one batch, until its duration is known
WARM_UP = 0.1  # share of the time whose timings are left out
POPULATE = 0.25  # share of the time in which decodes are gathered, if they are too few until then
LARGEST = 0.03  # share of the time that a batch may take at most
KV_SHARE = 0.75  # of the blocks, so that a batch under way always finds free ones
# Half of the requests are greedy, half are sampled as a request that sets nothing is.
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling()


class _Ran(NamedTuple):
    timed: Timed
    unusual: bool
    took_s: float


class Batch(NamedTuple):
    """A batch to time: decodes, each with `drafts` to verify, and chunks of `tokens` in all."""

    decodes: int
    chunks: int
    tokens: int
    drafts: int = 0


ROUND = (
    *(Batch(n, 0, 0) for n in DECODES),
    *(Batch(0, chunks, tokens) for chunks, tokens in PREFILLS),
    *(Batch(n, chunks, tokens) for n, chunks, tokens in MIXES),
)
VERIFYING = tuple(Batch(n, 0, 0, drafts) for n, drafts in VERIFICATIONS)


@dataclass(slots=True)
class _Request:
    slot: Slot
    known: int  # tokens: prompt and generated
    computed: int = 0


class Measurement:
    """Drives one engine, which holds nothing else meanwhile and is empty afterwards."""

    def __init__(self, engine: Engine, rng: Random) -> None:
        facts = engine.facts
        self._engine, self._rng, self._facts = engine, rng, facts
        self._kv_tokens = int(KV_SHARE * facts.kv_blocks) * facts.block_tokens
        # a context that each of many requests can have, with room for its output
        self._context = max(SHORTEST_TOKENS, min(facts.context_tokens, self._kv_tokens // 4) - 16)
        cost = facts.draft
        self._has_drafts = (cost[0] if isinstance(cost, tuple) else cost) > 0
        self._residents: list[_Request] = []  # requests that decode
        self._arriving: list[_Request] = []  # requests whose prefill is under way
        self._slots = [Slot(n) for n in range(min(facts.max_slots, RESIDENTS + 16))]
        self._most_tokens = FIRST_TOKENS
        self._quick_s = 0.0

    def run(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> list[Timed]:
        """Timings of about `seconds` by `clock`, without the warm-up."""
        self._quick_s = LARGEST * seconds
        began_s, timings = clock(), list[Timed]()
        unusual_s = 0.0  # spent in iterations that do not count
        todo: list[Batch] = []
        idle = 0  # batches in a row that could not run at all: the engine is too small for any
        try:
            while (spent_s := clock() - began_s - min(unusual_s, seconds)) < seconds:
                if idle > len(ROUND):
                    break
                populate = len(self._residents) < RESIDENTS and spent_s < POPULATE * seconds
                if populate:
                    batch = Batch(0, 4, 4 * self._length(SHORTEST_TOKENS))
                else:
                    if not todo:
                        todo = [*ROUND, *VERIFYING] if self._has_drafts else list(ROUND)
                        self._rng.shuffle(todo)
                    batch = todo.pop()
                ran = self._run(batch, whole=populate)
                idle = 0 if ran is not None else idle + 1
                if ran is None:
                    continue
                if ran.unusual:
                    unusual_s += ran.took_s
                elif spent_s >= WARM_UP * seconds:
                    timings.append(ran.timed)
        finally:
            for request in (*self._residents, *self._arriving):
                self._engine.release(request.slot)
        return timings

    def _run(self, batch: Batch, *, whole: bool) -> _Ran | None:
        """Run the part of a batch that is possible now. `whole`: each chunk is a whole prompt."""
        shape, work = BatchShape(), list[Work]()
        tokens = min(batch.tokens, max(1, self._most_tokens - batch.decodes))
        chunks = self._chunks(min(batch.chunks, tokens), tokens, whole=whole)
        for request, new in chunks:
            shape = shape.with_chunk(new, request.computed)
            work.append(Work(request.slot, new, request.computed + new == request.known))
        decoding = self._decoding(min(batch.decodes, len(self._residents)))
        for request in decoding:
            shape = shape._replace(
                decodes=shape.decodes + 1, decode_context=shape.decode_context + request.computed
            )
            work.append(Work(request.slot, 1 + self._drafts(request, batch.drafts), True))
        if not work:
            return None
        outcome = self._engine.execute(work, _chains(work) if batch.drafts else None)
        if batch.drafts:
            verified = np.array([did.drafted for did in outcome.done], dtype=np.int32)
            has = np.array([request.computed for request in decoding], dtype=np.int32)
            shape = shape.with_drafts(verified, has)
        under_way = (*(request for request, _ in chunks), *decoding)
        for request, did in zip(under_way, outcome.done, strict=True):
            request.computed += did.computed
            request.known += len(did.tokens)
        self._settle(chunks)
        exec_s = outcome.exec_s - outcome.drafted_s
        quick = exec_s < self._quick_s / 2 and not outcome.unusual
        if quick and 2 * shape.tokens > self._most_tokens:
            self._most_tokens *= 2
        return _Ran(Timed(shape, exec_s), outcome.unusual, outcome.exec_s)

    def _drafts(self, request: _Request, wanted: int) -> int:
        """The drafts that leave the request within its room."""
        return max(0, min(wanted, self._context + 15 - request.known))

    def _chunks(self, chunks: int, tokens: int, *, whole: bool) -> list[tuple[_Request, int]]:
        """Requests to prefill, with the tokens of each: new ones, or old ones with enough left."""
        chosen: list[tuple[_Request, int]] = []
        for n in range(chunks):
            each = tokens // chunks + (n < tokens % chunks)
            taken = [request.slot for request, _ in chosen]
            under_way = [request for request in self._arriving if request.slot not in taken]
            enough = [request for request in under_way if request.known - request.computed >= each]
            request: _Request | None
            if whole:
                request = self._load(each)
            elif enough and (len(self._arriving) >= ARRIVING or self._rng.random() < 0.7):
                request = self._rng.choice(enough)
            elif len(self._arriving) >= ARRIVING:
                request = max(under_way, key=lambda r: r.known - r.computed, default=None)
            else:
                request = self._load(self._length(each))
            if request is not None:
                chosen.append((request, min(each, request.known - request.computed)))
        return chosen

    def _decoding(self, n: int) -> list[_Request]:
        """Any n, or n of like contexts: else a fit confuses a cached token's cost with a decode."""
        if self._rng.random() < 0.5:
            return self._rng.sample(self._residents, n)
        first = self._rng.randint(0, len(self._residents) - n)
        return sorted(self._residents, key=lambda request: request.computed)[first : first + n]

    def _length(self, at_least: int) -> int:
        """The length of a new prompt: log-uniform, so that every ratio is as likely."""
        longest = min(self._context, LONGEST_TOKENS)
        return round(
            math.exp(
                self._rng.uniform(
                    math.log(min(max(at_least, SHORTEST_TOKENS), longest)), math.log(longest)
                )
            )
        )

    def _load(self, length: int) -> _Request | None:
        """A new request; residents give way for its slot and KV. None if that is not enough."""
        length = min(length, self._context)
        while self._residents and (not self._slots or self._held(length) > self._kv_tokens):
            self._release(self._residents, self._rng.choice(self._residents))
        if not self._slots or self._held(length) > self._kv_tokens:
            return None
        request = _Request(self._slots.pop(), length)
        self._arriving.append(request)
        vocabulary, rng = self._facts.vocabulary, self._rng
        sampling = GREEDY if request.slot % 2 else SAMPLED
        self._engine.load(
            Load(
                request.slot,
                [rng.randrange(vocabulary) for _ in range(length)],
                0,
                sampling,
                rng.getrandbits(32),
            )
        )
        return request

    def _held(self, more: int) -> int:
        """Tokens of KV, in whole blocks, that all requests and a new one of `more` will take."""
        size = self._facts.block_tokens
        lengths = (more, *(request.known for request in (*self._residents, *self._arriving)))
        return sum(-(-(length + 16) // size) * size for length in lengths)

    def _settle(self, chunks: list[tuple[_Request, int]]) -> None:
        """Keep requests that are prefilled; release any at its context's end, or one too many."""
        for request, _ in chunks:
            if request.computed + 1 == request.known:
                self._arriving.remove(request)
                self._residents.append(request)
        for request in [r for r in self._residents if r.known >= self._context + 16]:
            self._release(self._residents, request)
        while len(self._residents) > RESIDENTS:
            self._release(self._residents, self._residents[0])

    def _release(self, among: list[_Request], request: _Request) -> None:
        self._engine.release(request.slot)
        self._slots.append(request.slot)
        among.remove(request)


def _chains(work: Sequence[Work]) -> Selection:
    """Chains as long as the entries are, for batches that only decode."""
    return Selection(
        method="chain",
        depth=pack([entry.tokens - 1 for entry in work]),
        width=pack([1] * len(work)),
        budget_tokens=sum(entry.tokens for entry in work),
    )


def fit_engine(
    engine: Engine, seconds: float, *, clock: Callable[[], float] = time.monotonic
) -> ProfileFile | None:
    """The engine's profile, measured for `seconds`; None: too slow for that. It blocks."""
    facts = engine.facts
    log.info("profile.measuring", engine=facts.engine, model=facts.model, seconds=seconds)
    began_s = clock()
    timings = Measurement(engine, Random(1)).run(seconds, clock=clock)
    measured_s = clock() - began_s
    if len(timings) < LEAST:
        log.warning(
            "profile.not_fitted",
            observations=len(timings),
            needed=LEAST,
            measured_s=round(measured_s, 3),
            used=facts.profile,
        )
        return None
    file = fit(
        timings,
        name=_name(facts.model),
        gpu=f"{facts.engine} on {platform.machine() or 'unknown'}",
        model=facts.model or "unnamed",
        kv_capacity_tokens=facts.kv_blocks * facts.block_tokens,
        provenance=f"measured by the worker at its start, in {measured_s:.1f} s",
    )
    fields = {
        name: getattr(file.error, name)
        for name in ("mape", "mape_decode_only", "mape_mixed", "mape_prefill_only", "p95", "worst")
    }
    log.info(
        "profile.fitted",
        profile=file.name,
        coefficients=msgspec.to_builtins(file.coefficients),
        observations=len(timings),
        measured_s=round(measured_s, 3),
        fitting_s=round(clock() - began_s - measured_s, 3),
        **fields,
    )
    return file


def _name(model: str) -> str:
    """A valid profile name for the model."""
    return "fitted-" + (re.sub(r"[^a-z0-9._-]+", "-", model.lower())[:48].strip("-") or "engine")
