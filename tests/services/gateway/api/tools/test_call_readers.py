"""Tests of the readers that find tool calls in a model's text, in any format and cut anywhere."""

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.api.tools.call_readers import (
    Arguments,
    Called,
    NamedReader,
    Piece,
    Said,
    reader,
)
from shared.text.tool_format import ToolFormat

NAMES = frozenset({"weather", "time.now"})
CALLS = [("weather", {"city": "Oslo", "say": 'a "quote", a \\ and a }'}), ("time.now", {})]


class Heard(NamedTuple):
    """An answer as it was read: its text, and the names and arguments of its tool calls."""

    text: str
    calls: list[tuple[str, Any]]


def heard(pieces: Sequence[Piece]) -> Heard:
    """Put the pieces of an answer together. Raises for calls out of order."""
    text, calls, arguments = "", list[str](), list[str]()
    for piece in pieces:
        match piece:
            case Said(said):
                text += said
            case Called(number, name):
                assert number == len(calls)
                calls.append(name)
                arguments.append("")
            case Arguments(more):
                arguments[-1] += more
    return Heard(text, [(n, json.loads(a)) for n, a in zip(calls, arguments, strict=True)])


def read(form: str, text: str, cuts: Sequence[int] = ()) -> Heard:
    """Read a text in this form, which comes cut at these positions."""
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    calls = reader(form, NAMES)
    pieces: list[Piece] = []
    begin = 0
    for end in ends:
        pieces += calls.feed(text[begin:end])
        begin = end
    return heard([*pieces, *calls.finish()])


def hermes(name: str, arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def llama(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


LIST = json.dumps([{"name": name, "arguments": a} for name, a in CALLS], indent=1)
FORMS = [
    ("hermes", "\n".join(hermes(*call) for call in CALLS), Heard("", CALLS)),
    ("hermes", "I look.\n\n" + hermes(*CALLS[0]), Heard("I look.", CALLS[:1])),
    ("hermes", hermes(*CALLS[1]) + "\nDone.", Heard("\nDone.", CALLS[1:])),
    ("json", llama(*CALLS[0]), Heard("", CALLS[:1])),
    ("json", "<|python_tag|>" + "; ".join(llama(*call) for call in CALLS), Heard("", CALLS)),
    ("json", LIST, Heard("", CALLS)),
    ("json", f"```json\n{LIST}\n```", Heard("", CALLS)),
    ("json", f"```\n{llama(*CALLS[0])}\n```\n", Heard("", CALLS[:1])),
    ("mistral", "[TOOL_CALLS]" + LIST, Heard("", CALLS)),
    ("mistral", "[TOOL_CALLS] " + LIST, Heard("", CALLS)),
    (
        "mistral",
        "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(a)}" for name, a in CALLS),
        Heard("", CALLS),
    ),
    (
        "mistral",
        "So.[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]" + json.dumps(CALLS[0][1]),
        Heard("So.", CALLS[:1]),
    ),
    ("mistral", "[TOOL_CALLS]time.now{}", Heard("", CALLS[1:])),
    # members in another order, none, and as a text
    (
        "json",
        '{"arguments": {"a": [{}]}, "name": "weather"}',
        Heard("", [("weather", {"a": [{}]})]),
    ),
    ("hermes", '<tool_call>{"name": "weather"}</tool_call>', Heard("", [("weather", {})])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}", "n": 1.5}</tool_call>',
        Heard("", [("f", {"a": 1})]),
    ),
]  # fmt: skip
NO_CALLS = [
    ("hermes", "a < b and <tool> <tool_call"),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", "  two spaces, and a line\n"),
    ("json", "It is warm. {}"),
    ("json", '{"name": "Rome", "arguments": {}}'),
    ("json", '{"city": "Rome"}'),
    ("json", '[{"city": "Rome"}, 1]'),
    ("json", "[1, 2]"),
    ("json", "``` not closed"),
    ("json", '{"name"'),
    ("json", "<|python"),
    ("mistral", "no [TOOL], no [TOOL_CALLS"),
]
cuts = st.lists(st.integers(0, 200), max_size=30)


@pytest.mark.parametrize(("form", "text", "expected"), FORMS)
def test_calls_are_read_in_every_form(form: str, text: str, expected: Heard) -> None:
    assert read(form, text) == expected
    assert read(form, text, range(len(text))) == expected  # a character at a time


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_text_that_is_no_call_is_given_whole(form: str, text: str) -> None:
    assert read(form, text) == Heard(text, [])
    assert read(form, text, range(len(text))) == Heard(text, [])


@given(
    st.sampled_from(list(ToolFormat)), st.text(st.sampled_from('<tool_ca>[TOLCAS]{}":,`jsonam '))
)
def test_any_text_is_read_without_an_error(form: str, text: str) -> None:
    calls = reader(form, NAMES)
    for character in text:
        calls.feed(character)
    calls.finish()


def test_arguments_come_while_the_model_writes_them() -> None:
    for form, begin in (
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os'),
        ("json", '{"name": "weather", "parameters": {"city": "Os'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Os'),
    ):
        calls = reader(form, NAMES)
        assert calls.feed(begin)[-1] == Arguments('{"city": "Os'), form
        assert calls.feed("lo") == [Arguments("lo")], form


def test_text_comes_as_soon_as_it_is_no_call() -> None:
    assert reader("hermes", NAMES).feed("It is <b") == [Said("It is <b")]
    assert reader("json", NAMES).feed("It is") == [Said("It is")]
    assert reader("json", NAMES).feed('{"name": "Rome"') == [Said('{"name": "Rome"')]
    assert reader("mistral", NAMES).feed("It is") == [Said("It is")]


def test_the_answer_to_a_named_tool_is_its_arguments() -> None:
    named = NamedReader("weather")
    pieces = [*named.feed('{"a"'), *named.feed(": 1}"), *named.finish()]
    assert heard(pieces) == Heard("", [("weather", {"a": 1})])


LONG = {
    "arguments": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"t": "',
        "x",
        '"}}</tool_call>',
    ),
    "a text": ("hermes", '<tool_call>{"name": "f", "arguments": "', "x", '"}</tool_call>'),
    "nested": ("json", '{"name": "f", "arguments": {"t": [', "[1],", "1]}}"),
    "white space": ("hermes", "a", " ", "b"),
    "white space of Mistral": ("mistral", "a", " ", "b"),
    "white space in a list": ("json", "[", " ", ""),
    "no call": ("json", '{"answer": "', "x", '"}'),
    "calls": ("hermes", "", '<tool_call>{"name": "f"}</tool_call>', ""),
    "marks": ("hermes", "", "<tool_call>x", ""),
    "a list of calls": ("mistral", "[TOOL_CALLS][", '{"name": "f"},', "]"),
    "arguments of Mistral": ("mistral", '[TOOL_CALLS]f[ARGS]{"t": "', "x", '"}'),
    "a name": ("mistral", "[TOOL_CALLS]", "f", ""),
}


@pytest.mark.parametrize("step", [4, 1_000_000])
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_the_work_is_linear_in_the_text(text: tuple[str, str, str, str], step: int) -> None:
    """Eight times the text may take eight times as long, and a busy machine has three times that;
    quadratic work would take 64 times as long.
    """
    form, before, unit, after = text

    def spent_s(size: int) -> float:
        whole = before + size // len(unit) * unit + after
        began_s = time.process_time()
        reading = reader(form, {"f"})
        for at in range(0, len(whole), step):
            reading.feed(whole[at : at + step])
        reading.finish()
        return time.process_time() - began_s

    size = 10_000
    while (one_s := spent_s(size)) < 0.004:
        size *= 4
    assert min(spent_s(8 * size) for _ in range(3)) < 24 * max(one_s, spent_s(size))
