"""Turns a request's tokens into text: detokenised, cut before a stop string, never more than is
certain.

Text that may begin a stop string waits. An automaton follows each string character by character, so
the borders of tokens do not matter. The match that ends first wins, the longer one if two end
together. A match that is complete within `min_tokens` is ignored. The processor lives in the
engine's process.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shared.schemas import Sampling
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot


class Spoken(NamedTuple):
    """`text` may go out. If `stopped`, a stop string ended it within the first `tokens_kept`."""

    text: str
    stopped: bool
    tokens_kept: int


class OutputProcessor:
    """One output per open slot."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._outputs: dict[Slot, _Output] = {}

    def open(
        self,
        slot: Slot,
        sampling: Sampling,
        resume_tokens: Sequence[int] = (),
        resume_text: str = "",
    ) -> None:
        """Begin an output, or go on: the client has `resume_text` of the text of `resume_tokens`.
        Text that was held back is held back again. Text that the client lacks comes with the next
        tokens.
        """
        assert slot not in self._outputs, f"slot {slot} speaks already"
        detokenizer = self._tokenizer.detokenizer(specials=not sampling.skip_special_tokens)
        output = _Output(detokenizer, sampling.stop, sampling.min_tokens)
        text = "".join(output.feed(token) for token in resume_tokens)
        output.owed = text[len(resume_text) :]
        self._outputs[slot] = output

    def say(self, slot: Slot, tokens: Sequence[int]) -> Spoken:
        """The text that became certain with these tokens. After a stop there is none."""
        output = self._outputs[slot]
        text, output.owed = output.owed, ""
        for n, token in enumerate(tokens):
            if output.stopped:
                return Spoken(text, True, n)
            text += output.feed(token)
        return Spoken(text, output.stopped, len(tokens))

    def finish(self, slot: Slot) -> str:
        """The text that was held back, when no stop string ended the output. Empty after a stop."""
        output = self._outputs[slot]
        text, output.owed = output.owed, ""
        return text + output.finish()

    def piece(self, token: int) -> bytes:
        """The bytes of one token by itself, special ones by their name."""
        return self._tokenizer.piece(token)

    def close(self, slot: Slot) -> None:
        del self._outputs[slot]


class _Output:
    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._early = min_tokens  # tokens yet to come that no stop string may end
        self._stops = [_Stop(text) for text in stops if text]
        self._firsts = frozenset(stop.text[0] for stop in self._stops)
        self._held = ""  # the longest end of the text that begins a stop string
        self.owed = ""  # certain, and not yet sent
        self.stopped = False

    def feed(self, token: int) -> str:
        text = self._certain(self._detokenizer.feed(token))
        self._early -= 1
        return text

    def finish(self) -> str:
        if self.stopped:
            return ""
        text = self._certain(self._detokenizer.flush())
        text, self._held = text + self._held, ""
        return text

    def _certain(self, piece: str) -> str:
        if not self._held and self._firsts.isdisjoint(piece):
            return piece
        text = self._held + piece
        for n, character in enumerate(piece, start=len(self._held) + 1):
            longest = max(
                [stop.length for stop in self._stops if stop.advance(character)], default=0
            )
            if longest and self._early <= 0:
                self.stopped, self._held = True, ""
                return text[: n - longest]
        certain = len(text) - max(stop.matched for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]


class _Stop:
    """Follows one stop string in linear time (Knuth-Morris-Pratt): clients choose the strings."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.matched = 0  # characters of `text` that the output ends with
        # of text[: n + 1]: its longest proper end that is also its beginning
        self._fallback = [0] * self.length
        k = 0
        for n in range(1, self.length):
            while k and text[n] != text[k]:
                k = self._fallback[k - 1]
            k += text[n] == text[k]
            self._fallback[n] = k

    def advance(self, character: str) -> bool:
        """True when this character completes the string."""
        # beyond a match that was complete, and was ignored
        k = self.matched if self.matched < self.length else self._fallback[-1]
        while k and character != self.text[k]:
            k = self._fallback[k - 1]
        self.matched = k + (character == self.text[k])
        return self.matched == self.length
