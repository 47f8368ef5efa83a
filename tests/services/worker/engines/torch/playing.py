"""Plays prompts on a torch engine in random batches, for tests that compare the outputs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

from services.worker.engine import Likely
from services.worker.engines.torch.engine import TorchEngine
from shared.core.worker.step import Load, Work
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot


class Played(NamedTuple):
    """The output of one request of a play."""

    request: int
    tokens: list[int]
    logprobs: list[Likely]


def play(
    engine: TorchEngine,
    rng: Random,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], Sampling],
    *,
    slots: int,
    output: int,
    drafting: Callable[[Random, int], Selection] | None = None,
    counted: Counter[str] | None = None,
) -> Iterator[Played]:
    """Run every prompt until it has `output` tokens, with random chunks, mixes, orders, pauses,
    preemptions and moves; check the engine's count of KV blocks after each batch. `drafting`
    chooses the speculation of a plan with so many entries; `counted` counts drafts and cache hits.
    """
    counted = Counter[str]() if counted is None else counted
    facts = engine.facts

    def blocks(tokens: int) -> int:
        return -(-tokens // facts.block_tokens)

    def begin(slot: int) -> None:
        of, made = request[slot], len(known[slot]) - len(prompts[request[slot]])
        engine.load(Load(Slot(slot), known[slot], made, sampling(of), of))

    waiting = list(range(len(prompts)))
    rng.shuffle(waiting)
    request, known, computed = dict[int, int](), dict[int, list[int]](), dict[int, int]()
    likely = dict[int, list[Likely]]()
    free = facts.kv_blocks
    while waiting or known:
        for slot in range(slots):
            if slot not in known and waiting and rng.random() < 0.5:
                request[slot] = waiting.pop()
                known[slot], computed[slot], likely[slot] = list(prompts[request[slot]]), 0, []
                begin(slot)
        work, room = [], free
        for slot in rng.sample(sorted(known), len(known)):
            left = len(known[slot]) - computed[slot]
            made = len(known[slot]) - len(prompts[request[slot]])
            n = rng.choice([left, left, rng.randint(1, left)])
            if drafting is not None and left == 1 and made:
                n = rng.randint(1, min(8, output - made))
            more = blocks(computed[slot] + n) - blocks(computed[slot])
            if more <= room and rng.random() < 0.85:
                room -= more
                work.append(Work(Slot(slot), n, n >= left, needed=rng.uniform(0, 3)))
        selection = None if drafting is None else drafting(rng, len(work))
        done = engine.execute(work, selection).done if work else []
        for entry, did in zip(work, done, strict=True):
            slot = entry.slot
            left = len(known[slot]) - computed[slot]
            assert not did.failed
            if did.drafted:
                assert did.drafted < entry.tokens
                assert did.computed == len(did.tokens)
            else:
                assert did.computed == did.cached + min(entry.tokens, left - did.cached)
            counted["drafted"] += did.drafted
            counted["accepted"] += len(did.tokens) - 1 if did.drafted else 0
            counted["trees"] += did.drafted > 0
            counted["cached"] += did.cached
            free -= blocks(computed[slot] + did.computed) - blocks(computed[slot])
            computed[slot] += did.computed
            known[slot] += did.tokens
            likely[slot] += did.logprobs
        for slot in list(known):
            prompt = prompts[request[slot]]
            if ended := len(known[slot]) - len(prompt) >= output:
                yield Played(request[slot], known[slot][len(prompt) :], likely[slot])
                engine.release(Slot(slot))
            elif rng.random() < 0.04:
                engine.preempt(Slot(slot))
            elif rng.random() < 0.04 or (not work and rng.random() < 0.5):
                engine.release(Slot(slot))
                begin(slot)
            else:
                continue
            free += blocks(computed[slot])
            computed[slot] = 0
            if ended:
                del known[slot], computed[slot]
        state = engine.snapshot()
        # a shared block counts for each that holds it
        assert state.free_blocks == free or (state.shared_blocks and state.free_blocks > free)
        assert set(state.slots) == set(known)
        engine.check()
    assert engine.snapshot() == (facts.kv_blocks, [], 0, 0)
