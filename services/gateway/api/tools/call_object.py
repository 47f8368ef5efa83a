"""Reads a model's call of a tool, a JSON object, piece by piece: its arguments are passed on before
it is whole. Linear in the text.
"""

import json
import re

WHITE = " \t\n\r"
ARGUMENTS = ("arguments", "parameters")  # Hermes' and Mistral's name for them, and Llama's
# the next characters that end nothing: of a string, between strings, of a number or a name
_QUOTED = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_BARE = re.compile(rf"[^,}}{WHITE}]*")


class CallObject:
    """A call `{"name": ..., "arguments": {...}}` in any order; `name` None: not known yet."""

    def __init__(self) -> None:
        self.begun = False  # something was read
        self.name: str | None = None
        self.over = False  # the object is complete, or broken
        self.broken = False  # it is no call
        self._raw: list[str] = []
        self._awaits = "object"  # what comes next: object, key, colon, value or comma
        self._key = ""
        self._value: list[str] = []  # the key or the value being read
        self._text: Text | None = None  # of that value
        self._arguments: list[str] = []  # not taken yet
        self._has_arguments = False
        self._streams = False  # the value being read is the object of the arguments

    @property
    def raw(self) -> str:
        """Everything read so far."""
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Read on. Returns the number of characters that belong to the object."""
        at = 0
        while at < len(text) and not self.over:
            if self._text is not None:
                at = self._in_value(self._text, text, at)
            elif (self._awaits == "value" and text[at] not in WHITE) or (
                self._awaits == "key" and text[at] == '"'
            ):
                self._begin(text[at])
            else:
                self._read(text[at])
                at += 1
        self._raw.append(text[:at])
        self.begun = self.begun or at > 0
        return at

    def take(self) -> str:
        """The text of the arguments that has not been taken yet; none until the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, []
        return "".join(taken)

    def _read(self, character: str) -> None:
        """Read a character that stands around keys and values."""
        if character in WHITE:
            return
        if self._awaits == "object" and character == "{":
            self._awaits = "key"
        elif self._awaits == "colon" and character == ":":
            self._awaits = "value"
        elif self._awaits == "comma" and character == ",":
            self._awaits = "key"
        elif self._awaits in ("key", "comma") and character == "}":
            self._end()
        else:
            self._break()

    def _begin(self, character: str) -> None:
        self._text, self._value = Text(), []
        self._streams = self._awaits == "value" and self._key in ARGUMENTS and character == "{"
        self._has_arguments |= self._streams

    def _in_value(self, value: "Text", text: str, at: int) -> int:
        end = value.feed(text, at)
        self._value.append(text[at:end])
        if self._streams:
            self._arguments.append(text[at:end])
        if value.over:
            self._close()
        return end

    def _close(self) -> None:
        try:
            value = json.loads("".join(self._value))
        except (ValueError, RecursionError):
            self._break()
            return
        if self._awaits == "key":
            self._key, self._awaits = value, "colon"
        else:
            self._member(value)
            self._awaits = "comma"
        self._text, self._streams = None, False

    def _member(self, value: object) -> None:
        if self._key == "name":
            if not isinstance(value, str):
                self._break()
            else:
                self.name = value
        elif self._key in ARGUMENTS and not self._streams:
            # some models write them as a text, or null for none
            self._arguments = [value if isinstance(value, str) else "{}"]
            self._has_arguments = True

    def _end(self) -> None:
        if self.name is None:
            self._break()
            return
        if not self._has_arguments:
            self._arguments = ["{}"]
        self.over = True

    def _break(self) -> None:
        self.broken = self.over = True


class Text:
    """Finds the end of a JSON value: its last character, or the first one behind a bare one."""

    def __init__(self) -> None:
        self.over = False
        self._bare = False  # a number or a name
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._begun = False

    def feed(self, text: str, at: int = 0) -> int:
        """Read on from `at`. Returns the place behind the value's last character."""
        if not self._begun and at < len(text):
            self._begun, self._bare = True, text[at] not in '"{['
        while at < len(text) and not self.over:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            at = self._quiet.match(text, at).end()  # type: ignore[union-attr]  # it always matches
            if at < len(text):
                at += self._take(text[at])
        return at

    @property
    def _quiet(self) -> re.Pattern[str]:
        return _BARE if self._bare else _QUOTED if self._quoted else _BETWEEN

    def _take(self, character: str) -> int:
        """Take a character that may end the value. Returns how many belong to the value: 0 or 1."""
        if self._bare:
            self.over = True
            return 0
        if self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        else:
            self._depth += 1 if character in "{[" else -1
        self.over = not self._quoted and self._depth <= 0
        return 1
