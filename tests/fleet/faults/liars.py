"""Changes fields in some of a simulated fleet's own messages on their way. The messages stay
plausible, so they pass the first checks.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec

from shared.bus.codec import ERROR_HEADER
from shared.schemas import LogEntry
from tests.fleet.protocol.world import World
from tests.generated import encoded, nudged, tampered, valid
from tests.simulated.broker import Envelope

LIES = 0.15  # the share of messages that are changed


class Liars:
    """The senders on some subjects lie, in what they send and in what they answer, and in the logs
    that they write.
    """

    def __init__(
        self,
        world: World,
        rng: Random,
        said: Mapping[str, Any],
        answered: Mapping[str, Any],
        log: str,
    ) -> None:
        """`said` and `answered`: the kind of message on each subject; `log`: that of a log."""
        self._net, self._rng, self._said, self._answered = world.net, rng, said, answered
        self.share = LIES
        self._route, self._append = self._net.route, self._net.acks.append
        self._log = log
        self._net.route = self._routed  # type: ignore[method-assign]
        self._net.acks.append = self._appended  # type: ignore[method-assign]

    def _routed(self, envelope: Envelope) -> bool:
        rng, subject, answer = self._rng, envelope.subject, envelope.answers
        if answer is not None and subject in self._answered and rng.random() < self.share:
            kind, heard = self._answered[subject], answer
            envelope = envelope._replace(answers=lambda back: heard(self._changed(kind, back)))
        if subject in self._said and rng.random() < self.share:
            lie, how = self._changed(self._said[subject], envelope), rng.random()
            if how < 0.5:
                return self._route(lie)
            # half of the lies come beside the true message, before or after it
            first, then = (lie, envelope) if how < 0.75 else (envelope, lie)
            found = self._route(first)
            self._route(then._replace(answers=None))  # the first is the one that is answered
            return found
        return self._route(envelope)

    def _appended(self, subject: str, payload: bytes, expected_last: int) -> int:
        if subject == self._log and self._rng.random() < self.share:
            payload = changed(payload, LogEntry, self._rng)
        return self._append(subject, payload, expected_last)

    def _changed(self, kind: Any, envelope: Envelope) -> Envelope:
        if envelope.headers and ERROR_HEADER in envelope.headers:
            return envelope  # a refusal
        return envelope._replace(payload=changed(envelope.payload, kind, self._rng))


def changed(raw: bytes, kind: Any, rng: Random) -> bytes:
    """A message of ours with one or two places changed, with a field as its type allows it, or
    another of its kind.
    """
    how = rng.random()
    if how < 0.05:
        return tampered(raw, rng)
    value = msgspec.msgpack.decode(raw)
    if how < 0.3:
        other = valid(kind, rng)
        if how < 0.1 or not other or other.get("type") != value.get("type"):
            value = other
        else:
            name = rng.choice(list(other))
            value[name] = other[name]
    else:
        for _ in range(rng.randint(1, 2)):
            value = nudged(value, rng)
    return encoded(value, msgspec.msgpack.encode)
