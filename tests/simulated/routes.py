"""Finds the listeners of a subject for the simulated broker, with NATS' wildcards and groups."""

import random
from typing import Generic, Protocol, TypeVar

from shared.bus.matching import matches


class Listener(Protocol):
    @property
    def subject(self) -> str:
        """The subject it listens to: tokens, `*` for any single one, a last `>` for one or more."""

    @property
    def queue(self) -> str:
        """The queue group: one of its listeners receives each message. Empty: in no group."""


L = TypeVar("L", bound=Listener)


class Routes(Generic[L]):
    """The listeners, in order of arrival. The same seed and calls give the same choices."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._exact: dict[str, dict[L, None]] = {}
        self._wild: dict[L, list[str]] = {}
        # by subject; emptied when a wildcard comes or goes
        self._wild_found: dict[str, tuple[L, ...]] = {}

    def add(self, listener: L) -> None:
        tokens = listener.subject.split(".")
        if "*" in tokens or ">" in tokens:
            self._wild[listener] = tokens
            self._wild_found.clear()
        else:
            self._exact.setdefault(listener.subject, {})[listener] = None

    def remove(self, listener: L) -> None:
        """Remove a listener; one that is not there is ignored."""
        if self._wild.pop(listener, None) is not None:
            self._wild_found.clear()
        elif listener in (exact := self._exact.get(listener.subject, {})):
            del exact[listener]
            if not exact:
                del self._exact[listener.subject]

    def pick(self, subject: str) -> list[L]:
        """The listeners for one message: all of those in no queue group, and a random one of each
        group.
        """
        listeners = [*self._exact.get(subject, ()), *self._wildcards(subject)]
        if len(listeners) < 2:
            return listeners
        chosen, queues = list[L](), dict[str, list[L]]()
        for listener in listeners:
            if listener.queue:
                queues.setdefault(listener.queue, []).append(listener)
            else:
                chosen.append(listener)
        for members in queues.values():
            chosen.append(
                members[0] if len(members) == 1 else members[int(self._rng.random() * len(members))]
            )
        return chosen

    def _wildcards(self, subject: str) -> tuple[L, ...]:
        found = self._wild_found.get(subject)
        if found is None:
            tokens = subject.split(".")
            found = tuple(
                listener for listener, pattern in self._wild.items() if matches(pattern, tokens)
            )
            self._wild_found[subject] = found
        return found
