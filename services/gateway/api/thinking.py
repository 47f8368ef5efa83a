"""Tells a model's thinking from the answer behind it, as the text comes."""

from services.gateway.api.tools.call_readers import BeforeMark
from shared.schemas import Thinking
from shared.text.thinking import begin_of


class ThinkingReader:
    """Reads one choice. White space at the marks is nobody's."""

    def __init__(self, thinking: Thinking) -> None:
        self._begin = begin_of(thinking.end)
        self._before_end = BeforeMark(thinking.end)
        self._state = "thinking" if thinking.begun else "before"  # before, thinking or answer
        self._held = ""  # before: it may begin the mark
        self._fresh = thinking.begun  # nothing but white space since the mark

    def feed(self, text: str) -> tuple[str, str]:
        """The new part of the thinking, and that of the answer."""
        thought = ""
        if self._state == "before":
            text, self._held = self._held + text, ""
            shown = text.lstrip()
            if self._begin.startswith(shown) and shown != self._begin:
                self._held = text
                return "", ""
            if shown.startswith(self._begin):
                text = shown[len(self._begin) :]
                self._state, self._fresh = "thinking", True
            else:
                self._state = "answer"
        if self._state == "thinking":
            said, after = self._before_end.feed(text)
            thought = self._stripped(said)
            if after is None:
                return thought, ""
            self._state, self._fresh, text = "answer", True, after
        return thought, self._stripped(text)

    def finish(self) -> tuple[str, str]:
        """The rest at the end of the output."""
        held, self._held = self._held, ""
        return self._before_end.held.strip() if self._state == "thinking" else "", held

    def _stripped(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text
