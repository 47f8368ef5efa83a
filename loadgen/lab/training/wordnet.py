"""WordNet's files (Debian package wordnet-base) read into words with their senses.

Source: the manual pages wndb(5WN) and senseidx(5WN) for the formats of index.POS, data.POS and
cntlist.rev.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NOUN, VERB, ADJECTIVE, ADVERB = "noun", "verb", "adj", "adv"
POS_NUMBER = {NOUN: 1, VERB: 2, ADJECTIVE: 3, ADVERB: 4}  # as in sense keys
HYPERNYM, INSTANCE, HYPONYM, ANTONYM = ("@",), ("@i",), ("~",), ("!",)
PARTS = ("%p", "%m", "%s")
LEADING = re.compile(r"^\(([^()]*)\)\s*")  # a field of knowledge, or a note on use
PLAIN = re.compile(r"[A-Za-z][A-Za-z' -]*")


@dataclass(frozen=True, slots=True)
class Synset:
    """One meaning. The key of a synset is its part of speech and its offset in the file."""

    pos: str
    words: tuple[str, ...]
    field: str  # of knowledge, such as "computer science", if the gloss begins with one; else empty
    gloss: str
    examples: tuple[str, ...]
    # (pointer symbol, key of the target, number of the source word and of the target word; 0: all)
    related: tuple[tuple[str, tuple[str, int], int, int], ...]


@dataclass(frozen=True, slots=True)
class Word:
    """A lemma as one part of speech.

    `senses` has the most common first; `count` is the number of its tagged occurrences in
    Princeton's texts.
    """

    lemma: str
    pos: str
    senses: tuple[tuple[str, int], ...]
    count: int


class WordNet:
    def __init__(self, folder: Path) -> None:
        self.synsets: dict[tuple[str, int], Synset] = {}
        counts = _counts(folder / "cntlist.rev")
        self.words: list[Word] = []
        for pos in POS_NUMBER:
            for synset_key, synset in _synsets(folder, pos):
                self.synsets[synset_key] = synset
        for pos, number in POS_NUMBER.items():
            for lemma, senses in _lemmas(folder, pos):
                if PLAIN.fullmatch(lemma):
                    written = self._written(lemma, senses[0])
                    self.words.append(
                        Word(written, pos, senses, counts.get((lemma.replace(" ", "_"), number), 0))
                    )

    def _written(self, lemma: str, key: tuple[str, int]) -> str:
        """The lemma with the capitals of the synset; the index has none."""
        return next((word for word in self.synsets[key].words if word.lower() == lemma), lemma)

    def targets(self, synset: Synset, symbols: tuple[str, ...]) -> list[Synset]:
        return [
            self.synsets[target] for symbol, target, _, _ in synset.related if symbol in symbols
        ]

    def opposites(self, synset: Synset, lemma: str) -> list[str]:
        """The antonyms of a word. They are relations of words, not of meanings."""
        out = []
        for symbol, target, source_word, target_word in synset.related:
            if symbol in ANTONYM and source_word and synset.words[source_word - 1] == lemma:
                out.append(self.synsets[target].words[target_word - 1])
        return out


def _counts(path: Path) -> dict[tuple[str, int], int]:
    """[lemma, number of the part of speech] its tagged occurrences.

    Satellite adjectives (5) count as adjectives (3).
    """
    out: dict[tuple[str, int], int] = defaultdict(int)
    for line in path.read_text().splitlines():
        key, _, count = line.split()
        lemma, _, sense = key.partition("%")
        number = int(sense[0])
        out[lemma, 3 if number == 5 else number] += int(count)
    return dict(out)


def _records(path: Path) -> Iterator[str]:
    """The lines without those of the licence, which begin with spaces."""
    with path.open(encoding="ascii", errors="ignore") as lines:
        yield from (line for line in lines if not line.startswith("  "))


def _lemmas(folder: Path, pos: str) -> Iterator[tuple[str, tuple[tuple[str, int], ...]]]:
    for line in _records(folder / f"index.{pos}"):
        fields = line.split()
        senses = int(fields[2])
        yield fields[0].replace("_", " "), tuple((pos, int(offset)) for offset in fields[-senses:])


def _synsets(folder: Path, pos: str) -> Iterator[tuple[tuple[str, int], Synset]]:
    letters = {"n": NOUN, "v": VERB, "a": ADJECTIVE, "s": ADJECTIVE, "r": ADVERB}
    for line in _records(folder / f"data.{pos}"):
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        count = int(fields[3], 16)
        words = tuple(
            re.sub(r"\([a-z]+\)$", "", fields[4 + 2 * n]).replace("_", " ") for n in range(count)
        )
        at = 4 + 2 * count
        pointers = (fields[at + 1 + 4 * n : at + 5 + 4 * n] for n in range(int(fields[at])))
        related = tuple(
            (s, (letters[p], int(offset)), *bytes.fromhex(ends)) for s, offset, p, ends in pointers
        )
        field, definition, examples = split_gloss(gloss)
        yield (pos, int(fields[0])), Synset(pos, words, field, definition, examples, related)


def split_gloss(gloss: str) -> tuple[str, str, tuple[str, ...]]:
    """(field of knowledge, definition, example sentences) of a gloss as the files have it."""
    examples = tuple(e for e in re.findall(r'"([^"]*)"', gloss) if PLAIN.match(e))
    text = gloss.partition('"')[0].strip().rstrip(";:, ")
    field = ""
    while match := LEADING.match(text):
        note = match[1]
        if len(note) < 30 and not re.match(
            r"(of|used|usually|often|sometimes|followed|with|in|to|for|not|plural|informal|\W)",
            note,
        ):
            field = note
        text = text[match.end() :]
    text = text.split(";")[0] if len(text) > 160 else text
    return field, re.sub(r"\s+", " ", text.replace("`", "'")).strip(" ;:,"), examples
