"""An engine without a GPU: it takes the time that a profile predicts, keeps KV books, and makes readable tokens.

The GPU has a timeline of its own. An iteration begins where the one before it ended if its work was handed over at once
(ALLOWANCE_S after `execute` returned), else at the hand-over: so the lateness of Python does not add up, and a late plan
still costs. A thread that slept longer than HICCUP_S too long was stopped, not late: nothing is caught up then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.engine import Done, EngineFacts, EngineState, Load, Outcome, Work
from services.worker.engines import draws
from shared.perf.profile import Profile
from shared.perf.shape import BatchShape
from shared.schemas import Selection
from shared.vocabulary import Slot

# A real engine has its next batch queued behind the running one; here the thread first says the tokens of the last and
# comes back. Work that comes this soon counts as having been there in time.
ALLOWANCE_S = 0.0015
HICCUP_S = 0.010  # a sleep wakes 0.1 ms late, now and then 4 ms on a machine with other work

# Eight letters at a time, v a vowel, c a consonant: words of one to seven letters.
_CELLS = ("cvcvcvc ", "cvc cvc ", "cvcv cv ", "cv cvcv ", "vcvcvcv ", "vc cvcv ", "cvccvcv ", "v cvcvc ")
_VOWELS, _CONSONANTS = b"aeiou", b"bdfgklmnprstvz"


def readable_token(seed: int, n: int) -> int:
    """Output token n of a request: a byte (the built-in tokenizer's ids) of lower-case pseudo words."""
    cell, place = divmod(n, 8)
    kind = _CELLS[draws.bits(seed, cell) & 7][place]
    if kind == " ":
        return 0x20
    letters = _VOWELS if kind == "v" else _CONSONANTS
    return letters[draws.bits(~seed, n) % len(letters)]


@dataclass(slots=True)
class _Slot:
    prompt: int
    seed: int
    known: int  # tokens: prompt and generated
    computed: int = 0
    blocks: int = 0
    decoding: bool = False  # has emitted since it was loaded


class SimEngine:
    """Implements services.worker.engine.Engine.

    `pace` multiplies every duration. `wait(seconds)` sleeps (time.sleep in a live worker) by `clock()`, a monotonic one;
    with `wait` None nothing sleeps and nothing reads the clock. A drafted token is accepted with probability `acceptance`.
    """

    def __init__(
        self,
        facts: EngineFacts,
        profile: Profile,
        *,
        wait: Callable[[float], None] | None,
        clock: Callable[[], float],
        pace: float = 1.0,
        acceptance: float = 0.7,
    ) -> None:
        assert facts.vocabulary >= 128, "the tokens are ASCII"
        self._facts = facts
        self._profile = profile
        self._pace = pace
        self._wait = wait
        self._clock = clock
        self._acceptance = acceptance
        self._slots: dict[Slot, _Slot] = {}
        self._free_blocks = facts.kv_blocks
        self._ended_at_s = float("-inf")  # on the GPU's timeline, by `clock`
        self._returned_at_s = float("-inf")

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    def load(self, load: Load) -> None:
        assert load.slot not in self._slots, f"slot {load.slot} is loaded already"
        assert len(self._slots) < self._facts.max_slots, "no slot is free"
        assert 0 <= load.generated < len(load.tokens) <= self._facts.context_tokens, f"slot {load.slot}: impossible length"
        self._slots[load.slot] = _Slot(prompt=len(load.tokens) - load.generated, seed=load.seed, known=len(load.tokens))

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        handed_at_s = self._clock() if self._wait is not None else 0.0
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        speculates = selection is not None and selection.method == "chain"
        exec_s = self._pace * self._profile.batch_s(self._shape(work))
        done = [self._advance(entry, speculates) for entry in work]
        if self._wait is not None:
            in_time = handed_at_s - self._returned_at_s < ALLOWANCE_S and handed_at_s - self._ended_at_s < HICCUP_S
            self._ended_at_s = (self._ended_at_s if in_time else handed_at_s) + exec_s
            left_s = self._ended_at_s - self._clock()
            if left_s > 0:
                self._wait(left_s)
            self._returned_at_s = self._clock()
        return Outcome(done, exec_s)

    def release(self, slot: Slot) -> None:
        self._free_blocks += self._slots.pop(slot).blocks

    def snapshot(self) -> EngineState:
        return EngineState(self._free_blocks, list(self._slots))

    def close(self) -> None:
        self._slots.clear()
        self._free_blocks = self._facts.kv_blocks

    def _shape(self, work: Sequence[Work]) -> BatchShape:
        prefill_tokens = prefills = prefill_sq = prefill_cross = prefill_has = decodes = decode_context = 0
        for slot, tokens, _ in work:
            state = self._slots[slot]
            if state.decoding and tokens == 1:
                decodes += 1
                decode_context += state.computed
            else:
                prefills += 1
                prefill_tokens += tokens
                prefill_sq += tokens * tokens
                prefill_cross += state.computed * tokens
                prefill_has += state.computed
        return BatchShape(prefill_tokens, prefills, prefill_sq, prefill_cross, prefill_has, decodes, decode_context)

    def _advance(self, work: Work, speculates: bool) -> Done:
        state = self._slots[work.slot]
        left = state.known - state.computed
        drafts = work.tokens - 1 if speculates and state.decoding else 0
        assert 1 <= work.tokens <= left + drafts, f"slot {work.slot}: {work.tokens} tokens asked, {left} known"
        assert work.emits == (work.tokens == left + drafts), f"slot {work.slot}: emits is {work.emits} with {left} tokens left"
        self._reserve(state, state.computed + work.tokens)  # for full acceptance
        if not work.emits:
            state.computed += work.tokens
            return Done(work.tokens, ())
        first = state.known - state.prompt
        accepted = 0
        while accepted < drafts and draws.uniform(state.seed ^ 0x5EED, first + accepted) < self._acceptance:
            accepted += 1
        kept = work.tokens - drafts + accepted
        state.computed += kept
        state.known += accepted + 1
        state.decoding = True
        self._reserve(state, state.computed)  # the rejected give theirs back
        return Done(kept, [readable_token(state.seed, first + n) for n in range(accepted + 1)], drafts)

    def _reserve(self, state: _Slot, tokens: int) -> None:
        assert tokens <= self._facts.context_tokens, "over the context"
        blocks = -(-tokens // self._facts.block_tokens)
        self._free_blocks -= blocks - state.blocks
        state.blocks = blocks
        assert self._free_blocks >= 0, "more KV blocks promised than there are"
