"""Policies for tests of a replica: one does at random all that a policy may, one is observed."""

import dataclasses
from collections.abc import Callable, Sequence
from random import Random

import numpy as np

from shared.policy import registry
from shared.policy.seam import (
    Admission,
    Choice,
    Declared,
    Observation,
    Phase,
    Policy,
    Speculation,
    View,
)
from shared.schemas import Offer


class Chaos:
    """Does at random all that a policy may for a while, then serves in turn so that all ends."""

    name = "chaos"
    declared = Declared(drops=True)

    def __init__(self, rng: Random, calls: int = 60) -> None:
        self._rng, self._calls = rng, calls
        self._plain = registry.make("fcfs", {"chunk_tokens": "24"})

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        self._calls -= 1
        return [
            Admission(self._calls < 0 or self._rng.random() < 0.8, reason="chance") for _ in offers
        ]

    def plan(self, view: View) -> Sequence[Choice]:
        self._calls -= 1
        first = self._choice(view, 0)
        if self._calls < 0 or not (len(first.slots) or first.preempt or first.release):
            # a policy that chooses nothing is not asked again until something happens
            return self._plain.plan(view)
        if self._rng.random() < 0.5:
            first = self._speculating(first, view)
        later = [self._choice(view, n + 1) for n in range(self._rng.choice((0, 0, 0, 1, 3)))]
        return [first, *(choice for choice in later if len(choice.slots))]

    def _choice(self, view: View, ahead: int) -> Choice:
        """Iteration `ahead` from now on: of what may have become of a request by then, only what is
        certain to exist.
        """
        rng = self._rng
        rows = list(range(view.rows))
        rng.shuffle(rows)
        slots, caps = [], []
        for row in rows[: rng.randint(0, len(rows))]:
            if view.generated_tokens[row] + ahead >= view.max_tokens[row]:
                continue
            slots.append(int(view.slot[row]))
            caps.append(1 if ahead or view.phase[row] == Phase.DECODE else rng.randint(1, 40))

        def some(p: float) -> list[int]:
            return [] if ahead else [int(s) for s in view.slot if rng.random() < p]

        preempt = [s for s in some(0.04) if s not in slots]
        release = [(s, rng.choice(("offloaded", "dropped"))) for s in some(0.02)]
        named = {s for s, _ in release}
        return Choice(
            slots=np.array(slots, dtype=np.int32),
            caps=np.array(caps, dtype=np.int32),
            preempt=[s for s in preempt if s not in named],
            relegate=[s for s in some(0.04) if s not in named and s not in preempt],
            promote=(),
            release=release,
        )

    def _speculating(self, choice: Choice, view: View) -> Choice:
        """Some decodes draft, with more or less of a cap than their depth could fill."""
        decoding = {
            int(slot)
            for slot, phase in zip(view.slot, view.phase, strict=True)
            if phase == Phase.DECODE
        }
        chance = [
            self._rng.randint(1, 4) if int(slot) in decoding and self._rng.random() < 0.7 else 0
            for slot in choice.slots
        ]
        depth = np.array(chance, dtype=np.int32)
        caps = np.where(
            depth > 0,
            np.array([self._rng.randint(1, 6) for _ in chance], dtype=np.int32),
            choice.caps,
        ).astype(np.int32)
        zeros = np.zeros(len(depth), dtype=np.int32)
        drafts = Speculation(
            "chain", depth, zeros + 1, budget_tokens=1 << 20, needed_limit_tokens=1 << 20
        )
        return dataclasses.replace(choice, caps=caps, speculation=drafts)

    def observe(self, seen: Observation) -> None:
        self._plain.observe(seen)


class Watched:
    """Any policy; `look` gets each view before the policy plans by it."""

    def __init__(self, inner: Policy, look: Callable[[View], None]) -> None:
        self._inner, self._look = inner, look
        self.name, self.declared = inner.name, inner.declared

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return self._inner.admit(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        self._look(view)
        return self._inner.plan(view)

    def observe(self, seen: Observation) -> None:
        self._inner.observe(seen)
