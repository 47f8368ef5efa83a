"""Finds the calls of tools in an answer, in the form that its model writes. Text goes on as soon as
it cannot begin a call, arguments as the model writes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple, Protocol

from services.gateway.api.tools.call_object import WHITE, CallObject, Text
from shared.text.tool_format import ToolFormat


class Thought(NamedTuple):
    """Thinking, which comes before all else."""

    text: str


class Said(NamedTuple):
    """Text beside the calls."""

    text: str


class Called(NamedTuple):
    """A call begins. Calls are numbered from 0."""

    number: int
    name: str


class Arguments(NamedTuple):
    """New text of the arguments of the newest call."""

    text: str


Piece = Thought | Said | Called | Arguments

# characters read at a time: the text behind a call or a mark is copied
SLICE = 4096
NAME_LIMIT = 1024  # characters before the arguments, with marks and an id


class CallReader(Protocol):
    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """The rest at the end of the output."""


class BeforeMark:
    """The text in front of a mark. White space waits, and so do characters that may begin it."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._white: list[str] = []
        self._begun = ""

    @property
    def held(self) -> str:
        return "".join(self._white) + self._begun

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is certain by now, and the text behind the mark; None: no mark yet."""
        text, self._begun = self._begun + text, ""
        before, mark, after = text.partition(self._mark)
        if not mark:
            end = len(text) - _begun(text, self._mark)
            before, self._begun = text[:end], text[end:]
        said = before.rstrip()
        if said:
            white, self._white = self._white, [before[len(said) :]]
            said = "".join(white) + said
        else:
            self._white.append(before)
        if not mark:
            return said, None
        self._white = []
        return said, after


class _Reader(ABC):
    """The common part of the readers: the pieces found so far, and the call being read."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._count = 0
        self._object = CallObject()
        self._told = False  # the call being read has begun for the client

    def feed(self, text: str) -> list[Piece]:
        for at in range(0, len(text), SLICE):
            self._feed(text[at : at + SLICE])
        return self._taken()

    @abstractmethod
    def _feed(self, text: str) -> None:
        """Read this slice of the text into `_pieces`."""

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Said(text))

    def _call(self, name: str, arguments: str = "") -> None:
        self._pieces.append(Called(self._count, name))
        self._count += 1
        self._argue(arguments)

    def _argue(self, text: str) -> None:
        if text:
            self._pieces.append(Arguments(text))

    def _read_object(self, text: str, names: Collection[str] | None = None) -> str:
        """Read on in an object. Returns the text behind it. `names`: those allowed; None: any."""
        used = self._object.feed(text)
        name = self._object.name
        known = name is not None and (names is None or name in names)
        if not self._told and known:  # also if it is broken by now: a stream had told its name
            assert name is not None
            self._told = True
            self._call(name)
        if self._told:
            self._argue(self._object.take())
        return text[used:]

    def _reading(self) -> bool:
        return not self._object.over

    def _next_object(self) -> None:
        self._object, self._told = CallObject(), False

    def _taken(self) -> list[Piece]:
        taken, self._pieces = self._pieces, []
        return taken


class HermesReader(_Reader):
    """Reads <tool_call>{...}</tool_call>, anywhere in the text (Hermes, Qwen)."""

    OPENS, CLOSES = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._before = BeforeMark(self.OPENS)
        self._held = ""  # may begin the mark that closes
        self._inside = False

    def _feed(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = self._in_call(text) if self._inside else self._in_text(text)

    def finish(self) -> list[Piece]:
        if self._inside:
            if not self._told:  # cut off before its name
                self._say(self.OPENS + self._object.raw)
        elif not self._count or self._before.held.strip():
            self._say(self._before.held)
        return self._taken()

    def _in_text(self, text: str) -> str:
        said, after = self._before.feed(text)
        self._say(said)
        if after is None:
            return ""
        self._inside = True
        self._next_object()
        return after

    def _in_call(self, text: str) -> str:
        if self._reading():
            text = self._read_object(text)
            if self._reading():
                return ""
            if self._object.broken and not self._told:
                self._say(self.OPENS + self._object.raw)
                self._inside = False
                return text
        _, mark, after = text.partition(self.CLOSES)
        if mark:
            self._inside = False
            return after
        self._held = text[len(text) - _begun(text, self.CLOSES) :]
        return ""


class JsonReader(_Reader):
    """Reads an answer that is one call or a list of them, and nothing else (Llama 3, or a model
    without tools). If its first object is no call of a known tool, it is text.
    """

    BEFORE = ("<|python_tag|>", "```json", "```", "[")  # may stand before the first call
    BETWEEN = WHITE + ",;[]`"  # characters between two calls, and after the last

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._raw: list[str] = []  # all of it, while it is not known to be a call
        self._held = ""  # may begin a mark
        self._plain = False  # it is text
        # they may still come, each once and in this order
        self._marks: tuple[str, ...] = self.BEFORE

    def _feed(self, text: str) -> None:
        if self._plain:
            self._say(text)
            return
        if not self._count:
            self._raw.append(text)
        text, self._held = self._held + text, ""
        while text:
            inside = self._object.begun and self._reading()
            text = self._in_object(text) if inside else self._between(text)

    def finish(self) -> list[Piece]:
        if not self._count and not self._plain:
            self._say("".join(self._raw))
        return self._taken()

    def _in_object(self, text: str) -> str:
        rest = self._read_object(text, self._names)
        if self._told or (self._reading() and self._object.name is None):
            return rest
        if self._count:  # behind a call, and no call itself
            if self._reading():
                return rest
            self._say(self._object.raw)
            return rest
        return self._give_up("".join(self._raw))

    def _between(self, text: str) -> str:
        """Skip what may stand before an object. Returns the rest of the text, which begins one."""
        if not self._reading():
            self._next_object()
        rest = text.lstrip(self.BETWEEN if self._count else WHITE)
        for mark in () if self._count else self._marks:
            if rest.startswith(mark):
                rest = rest[len(mark) :].lstrip(WHITE)
                self._marks = self._marks[self._marks.index(mark) + 1 :]
            elif rest and mark.startswith(rest):
                self._held = rest
                return ""
        if not rest.startswith("{"):
            return self._give_up(rest if self._count else "".join(self._raw)) if rest else ""
        return self._in_object(rest)

    def _give_up(self, text: str) -> str:
        self._plain = True
        self._say(text)
        return ""


class MistralReader(_Reader):
    """Reads [TOOL_CALLS] and a list of calls, or names each with [ARGS] and arguments (Mistral)."""

    OPENS = "[TOOL_CALLS]"
    ARGUE = "[ARGS]"
    CALL_ID = "[CALL_ID]"  # behind the name, in some versions

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._list = JsonReader(names)
        self._before = BeforeMark(self.OPENS)
        self._held = ""  # a name that may not be whole
        self._state = "text"  # text, open, name, arguments or list
        self._value = Text()

    def _feed(self, text: str) -> None:
        text, self._held = self._held + text, ""
        while text:
            text = getattr(self, f"_in_{self._state}")(text)

    def finish(self) -> list[Piece]:
        if self._state == "list":
            self._pieces += self._list.finish()
        elif self._state == "text" and (not self._count or self._before.held.strip()):
            self._say(self._before.held)
        return self._taken()

    def _in_text(self, text: str) -> str:
        said, after = self._before.feed(text)
        self._say(said)
        if after is None:
            return ""
        self._state = "open"
        return after

    def _in_open(self, text: str) -> str:
        text = text.lstrip(WHITE)
        if text:
            self._state = "list" if text[0] in "[{" else "name"
        return text

    def _in_list(self, text: str) -> str:
        self._pieces += self._list.feed(text)
        return ""

    def _in_name(self, text: str) -> str:
        """Read on in a name, which ends where its arguments begin; if too long, it is text."""
        begin = text.find("{", 0, NAME_LIMIT)
        if begin < 0 and len(text) > NAME_LIMIT:
            self._say(self.OPENS)
            self._state = "text"
            return text
        if begin < 0:
            self._held = text
            return ""
        name = text[:begin].partition(self.CALL_ID)[0].replace(self.ARGUE, "").strip()
        self._call(name)
        self._state, self._value = "arguments", Text()
        return text[begin:]

    def _in_arguments(self, text: str) -> str:
        end = self._value.feed(text)
        self._argue(text[:end])
        if self._value.over:
            self._state = "text"
        return text[end:]


class NamedReader(_Reader):
    """The whole answer is the arguments of one tool, which the request named."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _feed(self, text: str) -> None:
        if not self._count:
            self._call(self._name)
        self._argue(text)

    def finish(self) -> list[Piece]:
        return []


def reader(form: str, names: Collection[str]) -> CallReader:
    """The reader of a model's own form. `form` is a ToolFormat."""
    if form == ToolFormat.HERMES:
        return HermesReader()
    if form == ToolFormat.MISTRAL:
        return MistralReader(names)
    return JsonReader(names)


def _begun(text: str, mark: str) -> int:
    """The length of the longest end of a text that begins a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
