"""Reads one call, a JSON object, character by character, so that its arguments can be sent on while
the model writes them.
"""

import json

WHITE = " \t\n\r"
ARGUMENTS = ("arguments", "parameters")  # Hermes' and Mistral's name for them, and Llama's


class CallObject:
    """A call `{"name": ..., "arguments": {...}}`, its members in any order.

    `name` is None until it is known.
    """

    def __init__(self) -> None:
        self.raw = ""  # everything read so far
        self.name: str | None = None
        self.over = False  # the object is complete, or broken
        self.broken = False  # it is no call
        self._awaits = "object"  # what comes next: object, key, colon, value or comma
        self._key = ""
        self._value = ""  # the key or the value being read
        self._text: Text | None = None  # of that value
        self._arguments = ""  # not taken yet
        self._has_arguments = False
        self._streams = False  # the value being read is the object of the arguments

    def feed(self, text: str) -> int:
        """Read on. The number of characters that belong to the object."""
        for n, character in enumerate(text):
            if self.over:
                return n
            self._read(character)
            self.raw += character
        return len(text)

    def take(self) -> str:
        """The text of the arguments that has not been taken yet; none until the name is known."""
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _read(self, character: str) -> None:
        if self._text is not None:
            self._in_value(character)
        elif character in WHITE:
            return
        elif self._awaits == "object" and character == "{":
            self._awaits = "key"
        elif self._awaits == "key" and character == '"':
            self._begin(character)
        elif self._awaits == "colon" and character == ":":
            self._awaits = "value"
        elif self._awaits == "value":
            self._begin(character)
        elif self._awaits == "comma" and character == ",":
            self._awaits = "key"
        elif self._awaits in ("key", "comma") and character == "}":
            self._end()
        else:
            self._break()

    def _begin(self, character: str) -> None:
        self._text, self._value = Text(), ""
        self._streams = self._awaits == "value" and self._key in ARGUMENTS and character == "{"
        self._has_arguments |= self._streams
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        assert self._text is not None
        if self._text.bare and character in ",}" + WHITE:  # the end of a number, true, false, null
            self._close()
            self._read(character)
            return
        self._value += character
        if self._streams:
            self._arguments += character
        if self._text.ends(character):
            self._close()

    def _close(self) -> None:
        try:
            value = json.loads(self._value)
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
            self._arguments = value if isinstance(value, str) else "{}"
            self._has_arguments = True

    def _end(self) -> None:
        if self.name is None:
            self._break()
            return
        if not self._has_arguments:
            self._arguments = "{}"
        self.over = True

    def _break(self) -> None:
        self.broken = self.over = True


class Text:
    """Finds the end of one JSON value: a string, an object or a list by its last character, any
    other value by the first one behind it.
    """

    def __init__(self) -> None:
        self.bare = False  # a number or a name
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._begun = False

    def ends(self, character: str) -> bool:
        """Tells whether the value ends with this character."""
        if not self._begun:
            self._begun, self.bare = True, character not in '"{['
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        return not self.bare and not self._quoted and not self._escaped and self._depth <= 0
