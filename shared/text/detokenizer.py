"""Turns tokens into text, one at a time; text that may still change is held back.

A byte-level vocabulary needs a table and an incremental UTF-8 decoder (0.2 us a token). For other
vocabularies a window of tokens is decoded with and without the new one: the difference is new text,
unless it ends inside a character (5-10 us).
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_Utf8 = codecs.getincrementaldecoder("utf-8")
_UNFINISHED = "\ufffd"  # the character that decoders put where bytes are missing
_PATIENCE = (
    8  # tokens; a character has at most 4 bytes, so text unfinished for longer has bad bytes
)


class Detokenizer(Protocol):
    """A reader of one output. Special tokens, and ids outside the vocabulary, have no text."""

    def feed(self, token: int) -> str:
        """The text that this token makes final; unfinished characters wait. Bad bytes: U+FFFD."""

    def flush(self) -> str:
        """The text left at the output's end: an unfinished character becomes U+FFFD."""


class ByteDetokenizer:
    """The detokenizer of byte-level vocabularies: `table[token]` is the token's bytes."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = _Utf8(errors="replace").decode

    def feed(self, token: int) -> str:
        try:
            return self._decode(self._table[token])
        except IndexError:  # models pad their vocabularies
            return ""

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For vocabularies in which a token's text depends on its neighbours; `silent` ids have no
    text. The window begins one emission back: so both texts lose a first space.
    """

    def __init__(self, decode: Callable[[list[int]], str], silent: frozenset[int]) -> None:
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._emitted = 0  # tokens of the window whose text has been returned
        self._emitted_text = ""  # the text of these tokens, decoded alone

    def feed(self, token: int) -> str:
        if token in self._silent:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        waiting = len(self._window) - self._emitted
        if len(text) <= len(self._emitted_text):
            if waiting >= _PATIENCE:  # no text for these, such as unknown ids
                del self._window[self._emitted :]
            return ""
        if text.endswith(_UNFINISHED) and waiting < _PATIENCE:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode(self._window))

    def _advance(self, text: str) -> str:
        new = text[len(self._emitted_text) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return new
