"""An engine without a GPU: it takes the time that a profile predicts, counts its KV blocks, and
makes readable tokens.

An iteration begins where the last one ended if it comes within ALLOWANCE_S of the return of
`execute`; else it begins when it comes. So delays of Python do not add up, but a late plan costs
time. If the thread woke HICCUP_S too late, the machine had stopped it: that time is lost, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from services.worker.engine import (
    Done,
    EngineFacts,
    EngineState,
    KnowsFacts,
    KvName,
    Lacking,
    Outcome,
)
from services.worker.engines import draws
from services.worker.engines.sim.script import Script
from shared.columns import unpack_list
from shared.core.prefixes.cache import Entry, Kept, PrefixCache
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.perf.draft import draft_of
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.acceptance import Acceptance, Speculated, drafting_depth, speculate
from shared.policy.speculation import along, without_drafts
from shared.prefix import (
    CHAIN_TOKENS,
    IS_PLACE,
    UNCHANGED,
    chain_of,
    extend,
    hashes_of,
    pack_hashes,
)
from shared.schemas import Selection
from shared.vocabulary import Slot

# A real engine has its next batch queued behind the running one. Here the thread first returns the
# tokens of the last batch. Work that comes this soon afterwards counts as queued in time.
ALLOWANCE_S = 0.0015
HICCUP_S = 0.010  # a sleep wakes 0.1 ms late, now and then 4 ms on a machine with other work

# Eight letters at a time, v a vowel, c a consonant: words of one to seven letters.
_CELLS = (
    "cvcvcvc ",
    "cvc cvc ",
    "cvcv cv ",
    "cv cvcv ",
    "vcvcvcv ",
    "vc cvcv ",
    "cvccvcv ",
    "v cvcvc ",
)
_VOWELS, _CONSONANTS = b"aeiou", b"bdfgklmnprstvz"


def readable_token(seed: int, n: int) -> int:
    """Output token n: a byte (the built-in tokenizer's ids) of lower-case pseudo words."""
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
    known: int  # tokens of prompt and output
    computed: int = 0
    drafted: int = 0  # positions filled in the draft's KV
    blocks: int = 0
    said: Sequence[int] | None = None  # its output, where a script has one
    decoding: bool = False  # has emitted a token since it was loaded
    # its text, and its part of the prefix cache; None: there is no cache
    text: list[int] | None = None
    salt: bytes = b""
    kept: Kept | None = None


def _token(slot: _Slot, n: int) -> int:
    """Output token n of a request. After the end of a script its last token repeats."""
    if slot.said is None:
        return readable_token(slot.seed, n)
    return slot.said[min(n, len(slot.said) - 1)]


class SimEngine(KnowsFacts):
    """Implements Engine (services/worker/engine.py). `pace` multiplies every duration.
    `wait(seconds)` sleeps, by the monotonic `clock()`; None: nothing sleeps. A draft costs the
    fractions `facts.draft` of the profile (none: only roots are verified). The acceptance model
    decides which drafts are accepted. `prefix_caching`: texts begin with what others computed, as
    in the torch engine, but for whole stretches of CHAIN_TOKENS only.
    """

    def __init__(
        self,
        facts: EngineFacts,
        profile: Profile,
        *,
        wait: Callable[[float], None] | None,
        clock: Callable[[], float],
        pace: float = 1.0,
        acceptance: Acceptance | None = None,
        script: Script | None = None,
        prefix_caching: bool = False,
    ) -> None:
        assert facts.vocabulary >= 128, "the tokens are ASCII"
        if prefix_caching and CHAIN_TOKENS % facts.block_tokens:
            raise ConfigError(
                f"prefix_caching with block_tokens {facts.block_tokens}: the simulated cache has "
                f"blocks that divide {CHAIN_TOKENS} tokens"
            )
        self._facts = facts
        self._profile = profile
        self._pace = pace
        self._wait = wait
        self._clock = clock
        self._draft, self._acceptance = draft_of(profile, facts.draft), acceptance or Acceptance()
        self._script = script
        self._slots: dict[Slot, _Slot] = {}
        self._free_blocks = facts.kv_blocks  # less what all slots hold, shared blocks included
        blocks = facts.kv_blocks, facts.block_tokens, facts.host_kv_blocks
        self._cache = PrefixCache(*blocks) if prefix_caching else None
        self._ended_at_s = float("-inf")  # on the GPU's timeline, by `clock`
        self._returned_at_s = float("-inf")

    def load(self, load: Load) -> None:
        self._check(load, self._slots)
        prompt = len(load.tokens) - load.generated
        self._slots[load.slot] = _Slot(
            prompt=prompt,
            seed=load.seed,
            known=len(load.tokens),
            said=self._script.answer(load.tokens[:prompt]) if self._script else None,
        )
        if self._cache is not None:
            state = self._slots[load.slot]
            state.text, state.salt = list(load.tokens), load.salt
            state.kept = Kept(chain_of(load.tokens, load.salt), load.keep_s)

    def execute(self, work: Sequence[Work], selection: Selection | None) -> Outcome:
        handed_at_s = self._clock() if self._wait is not None else 0.0
        assert len({entry.slot for entry in work}) == len(work), "a slot may be in a batch once"
        loaded_s = 0.0
        if self._cache is None:
            done, exec_s = self._compute(work, selection)
        else:
            done, exec_s = self._share(self._cache, work, selection)
            loaded_s = self._facts.kv_load_s * self._cache.loaded_tokens
            exec_s += loaded_s
        if self._wait is not None:
            in_time = (
                handed_at_s - self._returned_at_s < ALLOWANCE_S
                and handed_at_s - self._ended_at_s < HICCUP_S
            )
            self._ended_at_s = (self._ended_at_s if in_time else handed_at_s) + exec_s
            left_s = self._ended_at_s - self._clock()
            if left_s > 0:
                self._wait(left_s)
            self._returned_at_s = self._clock()
        prefixes = UNCHANGED if self._cache is None else self._cache.changes.take()
        return Outcome(done, exec_s, loaded_s=loaded_s, prefixes=prefixes)

    def _compute(
        self, work: Sequence[Work], selection: Selection | None
    ) -> tuple[list[Done], float]:
        """Returns what each entry did, and the seconds that the iteration takes."""
        if selection is None:
            exec_s = self._pace * self._profile.batch_s(
                self._shape(work, [entry.tokens for entry in work])
            )
            done = [
                self._advance(entry, entry.tokens, 0, self._slots[entry.slot].drafted)
                for entry in work
            ]
        else:
            did = self._speculate(work, selection)
            exec_s = self._pace * (
                did.drafted_s + self._profile.batch_s(self._shape(work, did.fills.tolist()))
            )
            columns = did.kept.tolist(), did.drafted.tolist(), did.filled.tolist()
            done = [self._advance(*each) for each in zip(work, *columns, strict=True)]
        return done, exec_s

    def _share(
        self, cache: PrefixCache, work: Sequence[Work], selection: Selection | None
    ) -> tuple[list[Done], float]:
        """The same where entries that begin may share blocks of others. An entry without room does
        nothing.
        """
        states = [self._slots[entry.slot] for entry in work]

        def entries() -> list[Entry]:
            return [
                Entry(state.kept, state.computed, state.known, entry.tokens)
                for entry, state in zip(work, states, strict=True)
            ]

        cached = cache.find(entries(), self._free_blocks_now)
        for state, found in zip(states, cached, strict=True):
            if found:
                state.computed = found
                self._reserve(state, found)
        runs = cache.fill(entries(), self._free_blocks_now)
        kept = [n for n, has_room in enumerate(runs) if has_room]
        rest = [work[n] if not cached[n] else self._less(work[n], states[n]) for n in kept]
        if selection is not None:
            # what begins was planned as a prefill, even if all but one token is found
            begun = [n for n, tokens in enumerate(cached) if tokens]
            selection = along(without_drafts(selection, begun), kept) if kept else None
        did, exec_s = self._compute(rest, selection)
        done = [Done(found, (), cached=found) for found in cached]
        for n, one in zip(kept, did, strict=True):
            done[n] = one._replace(computed=one.computed + cached[n], cached=cached[n])
            state = states[n]
            assert state.text is not None and state.kept is not None
            state.text += one.tokens
            extend(state.kept.chain, state.text, state.salt)
            cache.name(state.kept, state.computed)
        return done, exec_s

    def _less(self, entry: Work, state: _Slot) -> Work:
        """The entry, of which less is left to compute than was known."""
        left = state.known - state.computed
        return entry._replace(tokens=min(entry.tokens, left), emits=entry.tokens >= left)

    def preempt(self, slot: Slot) -> None:
        state = self._slots[slot]
        self._leave(state)
        state.computed = state.drafted = state.blocks = 0
        state.decoding = False

    def release(self, slot: Slot) -> None:
        self._leave(self._slots.pop(slot))

    def _leave(self, state: _Slot) -> None:
        self._free_blocks += state.blocks
        if self._cache is not None and state.kept is not None:
            self._cache.release(state.kept, self._clock())

    def lacking(self, tokens: Sequence[int], salt: bytes) -> Lacking:
        assert self._cache is not None, "KV without a cache does not move"
        chain = chain_of(tokens[: len(tokens) - 1], salt)
        found, away = self._cache.lacking(chain, self._free_blocks_now, self._clock())
        number = {block: n for n, block in enumerate(chain, 1)}
        names = [
            KvName(pack_hashes([block]), block if number[block] in IS_PLACE else None)
            for block in away
        ]
        return Lacking(found * CHAIN_TOKENS, names)

    def take_out(self, digests: Sequence[bytes], into: Sequence[memoryview]) -> list[bool]:
        assert self._cache is not None, "KV without a cache does not move"
        return [len(each) == 8 and self._cache.has(hashes_of(each)[0]) for each in digests]

    def bring_in(self, names: Sequence[KvName], payloads: Sequence[memoryview]) -> list[bool]:
        assert self._cache is not None, "KV without a cache does not move"
        blocks = hashes_of(b"".join(each.digest for each in names))
        places = {each.mark for each in names if each.mark is not None}
        return self._cache.bring_in(blocks, places, self._free_blocks_now, self._clock())

    @property
    def _free_blocks_now(self) -> int:
        return self._free_blocks + (0 if self._cache is None else self._cache.shared)

    def snapshot(self) -> EngineState:
        shared = 0 if self._cache is None else self._cache.shared
        return EngineState(self._free_blocks_now, list(self._slots), shared)

    def restart(self) -> None:
        self.close()
        if self._cache is not None:
            self._cache.forget()

    def close(self) -> None:
        for slot in list(self._slots):
            self.release(slot)

    def check(self) -> None:
        """Raises AssertionError unless the books of the prefix cache balance."""
        if self._cache is not None:
            self._cache.check(each.kept for each in self._slots.values() if each.kept is not None)

    def _speculate(self, work: Sequence[Work], selection: Selection) -> Speculated:
        states = [self._slots[entry.slot] for entry in work]
        tokens, has, left, made, filled = (
            np.array(column, dtype=np.int32)
            for column in zip(
                *(
                    (entry.tokens, s.computed, s.known - s.computed, s.known - s.prompt, s.drafted)
                    for entry, s in zip(work, states, strict=True)
                ),
                strict=True,
            )
        )
        needed = np.array([entry.needed for entry in work], dtype=np.float32)
        if self._facts.draft_kv_blocks:
            self._check_draft_kv(work, selection)
        seeds = np.array([state.seed % (1 << 64) for state in states], dtype=np.uint64)
        if self._draft is None:
            tokens = np.minimum(tokens, left)
            return Speculated(tokens, tokens, np.zeros_like(tokens), filled, 0.0)
        return speculate(
            self._draft,
            partial(self._acceptance.draft, seeds),
            selection,
            tokens,
            needed=needed,
            depth=drafting_depth(selection, left, made),
            made=made,
            has=has,
            filled=filled,
        )

    def _check_draft_kv(self, work: Sequence[Work], selection: Selection) -> None:
        """Raises AssertionError if these trees do not fit the draft model's KV."""
        filled = {slot: state.drafted for slot, state in self._slots.items()}
        columns = unpack_list(selection.depth), unpack_list(selection.width)
        for entry, depth, width in zip(work, *columns, strict=True):
            state = self._slots[entry.slot]
            if depth and state.decoding and state.known == state.computed + 1:
                filled[entry.slot] = state.known + (depth - 1) * width
        blocks = sum(-(-tokens // self._facts.block_tokens) for tokens in filled.values())
        assert blocks <= self._facts.draft_kv_blocks, "more draft KV promised than there is"

    def _shape(self, work: Sequence[Work], fills: Sequence[int]) -> BatchShape:
        prefill_tokens = prefills = prefill_sq = prefill_cross = prefill_has = 0
        verified, contexts = list[int](), list[int]()
        for entry, tokens in zip(work, fills, strict=True):
            state = self._slots[entry.slot]
            if state.decoding:
                verified.append(tokens - 1)
                contexts.append(state.computed)
            else:
                prefills += 1
                prefill_tokens += tokens
                prefill_sq += tokens * tokens
                prefill_cross += state.computed * tokens
                prefill_has += state.computed
        shape = BatchShape(
            prefill_tokens,
            prefills,
            prefill_sq,
            prefill_cross,
            prefill_has,
            len(contexts),
            sum(contexts),
        )
        if not any(verified):
            return shape
        return shape.with_drafts(np.array(verified, np.int32), np.array(contexts, np.int32))

    def _advance(self, work: Work, kept: int, drafted: int, filled: int) -> Done:
        """Advances by `kept` positions. A decode emits a token each, a prefill one at its end."""
        state = self._slots[work.slot]
        left = state.known - state.computed
        assert 1 <= kept <= work.tokens, f"slot {work.slot}: {work.tokens} tokens asked"
        assert left == 1 or kept <= left, (
            f"slot {work.slot}: {work.tokens} tokens asked, {left} known"
        )
        assert work.emits == (kept >= left), (
            f"slot {work.slot}: emits is {work.emits} with {left} tokens left"
        )
        self._reserve(state, state.computed + work.tokens)  # for full acceptance
        state.computed += kept
        state.drafted = filled
        if not work.emits:
            return Done(kept, ())
        first = state.known - state.prompt
        emitted = kept if left == 1 else 1
        state.known += emitted
        state.decoding = True
        self._reserve(state, state.computed)  # rejected drafts give theirs back
        return Done(kept, [_token(state, first + n) for n in range(emitted)], drafted)

    def _reserve(self, state: _Slot, tokens: int) -> None:
        assert tokens <= self._facts.context_tokens, "over the context"
        blocks = -(-tokens // self._facts.block_tokens)
        self._free_blocks -= blocks - state.blocks
        state.blocks = blocks
        assert self._free_blocks_now >= 0, "more KV blocks promised than there are"
