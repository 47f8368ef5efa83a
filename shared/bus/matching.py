"""Which subscriptions hear a subject: NATS wildcards and queue groups."""

import random
from typing import Generic, Protocol, TypeVar


class Listener(Protocol):
    @property
    def subject(self) -> str:
        """What it listens to: tokens, `*` for any one, a last `>` for one or more."""

    @property
    def queue(self) -> str:
        """Of the listeners with one queue name, one hears each message; empty: in no queue."""


L = TypeVar("L", bound=Listener)


class Routes(Generic[L]):
    """Listeners in order of arrival; the same seed and the same calls give the same choices."""

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
        """Nothing happens if it is not there."""
        if self._wild.pop(listener, None) is not None:
            self._wild_found.clear()
        elif listener in (exact := self._exact.get(listener.subject, {})):
            del exact[listener]
            if not exact:
                del self._exact[listener.subject]

    def pick(self, subject: str) -> list[L]:
        """Who hears one message: everyone outside queues, and a random one of each queue."""
        heard, queues = list[L](), dict[str, list[L]]()
        for listener in (*self._exact.get(subject, ()), *self._wildcards(subject)):
            if listener.queue:
                queues.setdefault(listener.queue, []).append(listener)
            else:
                heard.append(listener)
        for members in queues.values():
            heard.append(
                members[0] if len(members) == 1 else members[int(self._rng.random() * len(members))]
            )
        return heard

    def _wildcards(self, subject: str) -> tuple[L, ...]:
        found = self._wild_found.get(subject)
        if found is None:
            tokens = subject.split(".")
            found = tuple(
                listener for listener, pattern in self._wild.items() if matches(pattern, tokens)
            )
            self._wild_found[subject] = found
        return found


def matches(pattern: list[str], tokens: list[str]) -> bool:
    """Whether a subject of these tokens is one that the pattern names."""
    if pattern[-1] == ">":
        pattern = pattern[:-1]
        if len(tokens) <= len(pattern):
            return False
        tokens = tokens[: len(pattern)]
    return len(pattern) == len(tokens) and all(
        p in ("*", t) for p, t in zip(pattern, tokens, strict=True)
    )
