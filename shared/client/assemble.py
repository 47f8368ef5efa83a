"""Puts a request's events in order: every token once, the end last. Without clock or bus: at a gap
the reader asks the log, which has all (`ask`), and hands in its answer (`fill`).
"""

from typing import assert_never

from shared.schemas import Delta, End, Replay, Status, StreamEvent, Verdict

# deltas kept while a gap is filled, about a second's; dropped ones come with the next replay
PARKED_LIMIT = 64


class Assembler:
    """Takes every event; returns those to show. What was shown is always the first `tokens` tokens
    and `characters` characters of the log. Only offsets decide, also for earlier attempts.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.characters = 0
        self.ended = False
        self._attempt = 0
        self._parked: list[Delta] = []
        self._verdict: Verdict | None = None
        # the last text is here too: text may follow the last token (held back for stop strings)
        self._whole = False
        self._text_behind = False  # a replay from `tokens` on does not reach back to `characters`
        self._asked_after_end = False

    @property
    def missing(self) -> bool:
        """True if output exists that has not arrived: time to ask."""
        return not self.ended and (
            bool(self._parked) or self._verdict is not None or self._text_behind
        )

    def ask(self) -> int:
        """The token from which to ask for a replay, for `fill`. Ask once at a time."""
        self._asked_after_end = self._verdict is not None
        return 0 if self._text_behind else self.tokens

    def take(self, event: StreamEvent) -> list[StreamEvent]:
        """The events to show now: no repeats, no statuses of past attempts, none that must wait."""
        if self.ended:
            return []
        match event:
            case Delta():
                return self._advance(event) + self._finish()
            case Status():
                if event.attempt < self._attempt:
                    return []
                self._attempt = event.attempt
                return [event]
            case End():
                self._verdict = event.verdict
                return self._finish()
            case _:
                assert_never(event)

    def fill(self, replay: Replay) -> list[StreamEvent]:
        """The events that may be shown after the answer to the last `ask`."""
        if self.ended:
            return []
        self._text_behind = replay.text_offset > self.characters
        if self._text_behind or replay.offset > self.tokens:
            return []
        if replay.verdict is not None:
            self._verdict = replay.verdict
        known = Delta(
            attempt=self._attempt,
            offset=replay.offset,
            tokens=replay.tokens,
            text=replay.text,
            text_offset=replay.text_offset,
            logprobs=replay.logprobs,
        )
        out = self._advance(known)
        # The log is complete before the verdict is given, so this replay is complete, too.
        self._whole = self._whole or replay.verdict is not None or self._asked_after_end
        return out + self._finish()

    def _advance(self, delta: Delta) -> list[StreamEvent]:
        if delta.offset > self.tokens or delta.text_offset > self.characters:
            if len(self._parked) < PARKED_LIMIT:
                self._parked.append(delta)
            return []
        out = self._show(delta)
        if not self._parked:
            return out
        self._parked.sort(key=lambda parked: (parked.offset, parked.text_offset))
        while (
            self._parked
            and self._parked[0].offset <= self.tokens
            and self._parked[0].text_offset <= self.characters
        ):
            out += self._show(self._parked.pop(0))
        return out

    def _show(self, delta: Delta) -> list[StreamEvent]:
        """The new part of a delta that fits."""
        tokens = delta.tokens[self.tokens - delta.offset :]
        text = delta.text[self.characters - delta.text_offset :]
        last = delta.finish_reason is not None and not self._whole
        self._whole = self._whole or last
        if not tokens and not text and not last:
            return []
        shown = delta
        if (delta.offset, delta.text_offset) != (self.tokens, self.characters):
            shown = Delta(
                attempt=delta.attempt,
                offset=self.tokens,
                tokens=tokens,
                text=text,
                text_offset=self.characters,
                finish_reason=delta.finish_reason,
                logprobs=delta.logprobs[self.tokens - delta.offset :],
            )
        self.tokens += len(tokens)
        self.characters += len(text)
        return [shown]

    def _finish(self) -> list[StreamEvent]:
        verdict = self._verdict
        if (
            verdict is None
            or self.tokens < verdict.output_tokens
            or not (self._whole or verdict.output_tokens == 0)
        ):
            return []
        self.ended = True
        self._parked.clear()
        return [End(verdict=verdict)]
