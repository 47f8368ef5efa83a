"""Tests of the text that a worker sends clients: whole characters, cut before a stop string."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.worker.output_processor import OutputProcessor
from shared.schemas import Sampling
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

SLOT = Slot(7)
TOKENIZER = Tokenizer.builtin()
# Few letters, so that stop strings begin, fail and overlap often.
texts = st.text("abé🙂", max_size=40)
stops = st.lists(st.text("abé🙂", min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 200), max_size=12)


def pieces(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    borders = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[a:b] for a, b in pairwise(borders)]


def expected(text: str, stops: list[str]) -> tuple[str, int | None]:
    """Text before the stop string that ends first (the longest of those), and how many bytes it
    takes to see it.
    """
    for n in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:n].endswith(stop)]
        if ending:
            return text[: n - max(map(len, ending))], len(text[:n].encode())
    return text, None


@given(texts, stops, cuts)
def test_text_ends_before_the_first_stop_string_wherever_tokens_are_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.open(SLOT, Sampling(stop=stops))
    wanted, stop_at = expected(text, stops)
    said, kept, stopped = "", 0, False
    for piece in pieces(TOKENIZER.encode(text), cuts):
        spoken = processor.say(SLOT, piece)
        said += spoken.text
        kept += spoken.tokens_kept
        stopped = spoken.stopped
        assert wanted.startswith(said)
    said += processor.finish(SLOT)
    assert said == wanted
    assert stopped == (stop_at is not None)
    assert kept == (len(text.encode()) if stop_at is None else stop_at)


@given(texts, stops, cuts)
def test_an_attempt_that_moves_between_any_two_tokens_loses_and_doubles_nothing(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    tokens = TOKENIZER.encode(text)
    said, made, stopped = "", 0, False
    for piece in pieces(tokens, cuts):
        processor = OutputProcessor(TOKENIZER)  # another worker each time
        processor.open(SLOT, Sampling(stop=stops), tokens[:made], said)
        spoken = processor.say(SLOT, piece)
        said, made, stopped = said + spoken.text, made + spoken.tokens_kept, spoken.stopped
        if stopped:
            break
    if not stopped:
        said += processor.finish(SLOT)
    assert said == expected(text, stops)[0]


def test_an_unfinished_character_is_shown_as_such_only_at_the_end() -> None:
    processor = OutputProcessor(TOKENIZER)
    processor.open(SLOT, Sampling())
    assert processor.say(SLOT, list("日".encode())[:2]) == ("", False, 2)
    assert processor.finish(SLOT) == "\ufffd"


def test_after_a_stop_nothing_more_is_said_and_slots_are_apart() -> None:
    processor, other = OutputProcessor(TOKENIZER), Slot(8)
    processor.open(SLOT, Sampling(stop=["END"]))
    processor.open(other, Sampling())
    assert processor.say(SLOT, TOKENIZER.encode("doneENDmore")) == ("done", True, 7)
    assert processor.say(SLOT, TOKENIZER.encode("more")) == ("", True, 0)
    assert processor.finish(SLOT) == ""
    assert processor.say(other, TOKENIZER.encode("END")) == ("END", False, 3)
    processor.close(SLOT)
    processor.open(SLOT, Sampling())
    assert processor.say(SLOT, TOKENIZER.encode("END")).text == "END"


@given(texts, stops, cuts, st.integers(0, 60))
def test_a_stop_string_that_is_whole_within_min_tokens_is_not_heeded(
    text: str, stops: list[str], cuts: list[int], least: int
) -> None:
    """The built-in tokens are bytes."""

    def cut_at(n: int) -> str | None:
        ending = [stop for stop in stops if text[:n].endswith(stop)]
        return (
            text[: n - max(map(len, ending))] if ending and len(text[:n].encode()) > least else None
        )

    tokens = list(text.encode())
    wanted = next(
        (found for n in range(1, len(text) + 1) if (found := cut_at(n)) is not None), None
    )
    processor = OutputProcessor(TOKENIZER)
    processor.open(SLOT, Sampling(stop=stops, min_tokens=least))
    said, stopped = "", False
    for piece in pieces(tokens, cuts):
        spoken = processor.say(SLOT, piece)
        said, stopped = said + spoken.text, spoken.stopped
        if stopped:
            break
    assert stopped == (wanted is not None)
    assert said + processor.finish(SLOT) == (text if wanted is None else wanted)
