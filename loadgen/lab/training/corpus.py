"""The training text: dialogues about words, and prose. A seed generates it from the sources.

No text is stored. Documents end with <|eos|>. One in fifty words and pages is held out: no training
document is about them.
"""

import zlib
from bisect import bisect
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from random import Random

from loadgen.lab.training import phrases
from loadgen.lab.training.prose import Page, read_pages, sentences
from loadgen.lab.training.sentences import Speaker, a, define, named
from loadgen.lab.training.wordnet import ADJECTIVE, ADVERB, NOUN, VERB, Word, WordNet
from shared.errors import ConfigError

# [Debian package] its folder
SOURCES = {"wordnet-base": "usr/share/wordnet", "sqlite3-doc": "usr/share/doc/sqlite3"}
HELD_OUT = 50  # one in so many words and pages is held out
# The fewest tagged occurrences of a word in a question. Without rare words the model learns the
# common ones better.
SEEN_AT_LEAST = 12
END = "<|eos|>"
SYSTEM_SHARE, FOLLOW_SHARE, SLOPPY_SHARE = 0.25, 0.2, 0.25
SUMMARY_CHARACTERS = 5000  # longest text to shorten
Turns = list[tuple[str, str]]  # question and answer


def chat_text(turns: Turns, system: str | None = None) -> str:
    """The turns as the chat template renders them, with their answers."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    rendered = (
        f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        for q, answer in turns
    )
    return head + "".join(rendered)


def held_out(name: str) -> bool:
    return zlib.crc32(name.encode()) % HELD_OUT == 0


def sources(texts: Path) -> dict[str, Path]:
    """The folder of each source under `texts`, an unpacked tree or the root of the system.

    Raises ConfigError with the commands that install the missing sources.
    """
    folders = {package: texts / folder for package, folder in SOURCES.items()}
    missing = [package for package, path in folders.items() if not path.is_dir()]
    if missing:
        names = " ".join(missing)
        raise ConfigError(
            f"no {' and no '.join(missing)} under {texts}: run `apt-get install {names}`; "
            f"or, without root, `apt-get download {names}`, then `dpkg -x FILE.deb DIR` "
            "for each file, and pass --texts DIR"
        )
    return folders


class Chooser:
    """Draws words; more common words are drawn more often."""

    def __init__(self, words: list[Word]) -> None:
        self._words = words
        self._sums = list(accumulate(word.count**0.6 for word in words))

    def __call__(self, rng: Random) -> Word:
        return self._words[bisect(self._sums, rng.random() * self._sums[-1])]


class Corpus:
    """Documents about the words and pages that are held out, or about all others."""

    def __init__(self, words: WordNet, pages: list[Page], *, held: bool) -> None:
        self.speaker = Speaker(words)
        asked = [
            w
            for w in words.words
            if w.count >= SEEN_AT_LEAST
            and len(w.lemma) > 1
            and held_out(w.lemma) == held
            and self._clear(w)
        ]
        self._pages = [page for page in pages if held_out(page.title) == held]
        self._paragraphs = [p for page in self._pages for p in page.paragraphs]
        by_pos = {
            pos: [w for w in asked if w.pos == pos] for pos in (NOUN, VERB, ADJECTIVE, ADVERB)
        }
        self._any, self._noun = Chooser(asked), Chooser(by_pos[NOUN])
        self._verb, self._adjective = Chooser(by_pos[VERB]), Chooser(by_pos[ADJECTIVE])
        self.words, self.page_count = len(asked), len(self._pages)
        # (share, maker); a share is of the documents, not of the tokens.
        self._makers: list[tuple[float, Callable[[Random], str]]] = [
            (0.53, self._short),
            (0.20, self._long),
            (0.09, self._open),
            (0.05, self._talk),
            (0.06, self._summary),
            (0.03, self._about_page),
            (0.04, self._prose),
        ]

    @staticmethod
    def read(found: dict[str, Path], *, held: bool = False) -> "Corpus":
        return Corpus(WordNet(found["wordnet-base"]), read_pages(found["sqlite3-doc"]), held=held)

    def _clear(self, word: Word) -> bool:
        return 2 < len(self.speaker.first(word).gloss) < 200

    def documents(self, seed: int) -> Iterator[str]:
        """An endless stream of documents, the same for the same seed."""
        rng = Random(seed)
        makers, shares = [maker for _, maker in self._makers], [share for share, _ in self._makers]
        while True:
            yield rng.choices(makers, shares)[0](rng) + END

    def _chat(self, rng: Random, turns: Turns) -> str:
        system = rng.choice(phrases.SYSTEM) if rng.random() < SYSTEM_SHARE else None
        return chat_text(turns, system)

    def _ask(
        self,
        rng: Random,
        forms: tuple[str, ...],
        word: Word,
        other: Word | None = None,
        **more: str,
    ) -> str:
        """A question about the word. Some questions are carelessly written, as people write."""
        names = {"w": word.lemma, "n": self._called(rng, word)} | more
        if other is not None:
            names |= {"m": self._called(rng, other), "o": other.lemma}
        text = rng.choice(forms).format(**names)
        text = text[:1].upper() + text[1:]
        if rng.random() < SLOPPY_SHARE:
            text = rng.choice(
                (str.lower, lambda t: t.rstrip("?.!"), lambda t: t.lower().rstrip("?.!"))
            )(text)
        return text

    def _called(self, rng: Random, word: Word) -> str:
        if word.pos == NOUN and rng.random() < 0.3:
            return a(word.lemma)
        return named(word, self.speaker.first(word))

    def _facts(self, rng: Random, word: Word) -> list[tuple[str, tuple[str, ...], str]]:
        """The facts about a word: (kind, forms of the question, answer)."""
        speaker, synset = self.speaker, self.speaker.first(word)
        possible = (
            ("use", phrases.USE, speaker.use(word, synset)),
            ("another", phrases.ANOTHER, speaker.another(word, synset)),
            ("opposite", phrases.OPPOSITE, speaker.opposite(word, synset)),
            ("kind", phrases.KIND, speaker.kind(word, synset) if word.pos == NOUN else None),
            ("kinds", phrases.KINDS, speaker.kinds(word, synset) if word.pos == NOUN else None),
            ("parts", phrases.PARTS, speaker.parts(word, synset)),
            ("others", (), speaker.others(word, 2)),
        )
        return [(name, forms, answer) for name, forms, answer in possible if answer]

    def _short(self, rng: Random) -> str:
        word = self._any(rng)
        synset = self.speaker.first(word)
        facts = self._facts(rng, word)
        askable = [fact for fact in facts if fact[1]]
        if askable and rng.random() < 0.4:
            _, forms, answer = rng.choice(askable)
            turns = [(self._ask(rng, forms, word), answer)]
        else:
            answer = define(word, synset)
            turns = [(self._ask(rng, phrases.DEFINE, word), answer)]
        while facts and rng.random() < FOLLOW_SHARE:
            name, _, further = facts.pop(rng.randrange(len(facts)))
            if further != answer:
                turns.append((rng.choice(phrases.AGAIN[name]), further))
        return self._chat(rng, turns)

    def _long(self, rng: Random) -> str:
        word = self._noun(rng) if rng.random() < 0.7 else self._any(rng)
        if rng.random() < 0.12:
            return self._chat(
                rng, [(self._ask(rng, phrases.VERSE, word), self.speaker.verse(word))]
            )
        return self._chat(
            rng,
            [
                (
                    self._ask(rng, phrases.ABOUT, word),
                    self.speaker.about(word, rng, rng.randint(1, 6)),
                )
            ],
        )

    def _open(self, rng: Random) -> str:
        """A question that a dictionary does not answer; the answer defines its words."""
        noun, form = self._noun(rng), rng.randrange(3)
        if form == 0:
            other = self._adjective(rng)
            question = self._ask(rng, phrases.OPEN_ADJECTIVE, noun, j=other.lemma)
        elif form == 1:
            other = self._verb(rng)
            question = self._ask(rng, phrases.OPEN_VERB, noun, v=other.lemma)
        else:
            other = self._noun(rng)
            question = self._ask(rng, phrases.OPEN_NOUN, noun, other)
        both = [define(noun, self.speaker.first(noun)), define(other, self.speaker.first(other))]
        if form == 1:
            both.reverse()
        example = self.speaker.use(other, self.speaker.first(other))
        return self._chat(
            rng, [(question, " ".join([*both, *([f"For example: {example}"] if example else [])]))]
        )

    def _talk(self, rng: Random) -> str:
        turns = []
        for asked, answered in rng.sample(phrases.TALK, rng.choice((1, 1, 1, 2))):
            question = rng.choice(asked)
            turns.append(
                (
                    question.lower().rstrip("!.?") if rng.random() < SLOPPY_SHARE else question,
                    rng.choice(answered),
                )
            )
        if rng.random() < 0.3:
            word = self._any(rng)
            turns.append(
                (self._ask(rng, phrases.DEFINE, word), define(word, self.speaker.first(word)))
            )
        return self._chat(rng, turns)

    def _summary(self, rng: Random) -> str:
        page = rng.choice(self._pages)
        first = rng.randrange(len(page.paragraphs))
        count = 1 if rng.random() < 0.7 else rng.randint(2, 8)
        text = page.paragraphs[first]
        for paragraph in page.paragraphs[first + 1 : first + count]:
            if len(text) + len(paragraph) < SUMMARY_CHARACTERS:
                text += "\n\n" + paragraph
        return self._chat(
            rng, [(rng.choice(phrases.SUMMARISE).replace("{t}", text), sentences(text)[0])]
        )

    def _about_page(self, rng: Random) -> str:
        page = rng.choice(self._pages)
        answer = " ".join(page.paragraphs[: rng.randint(1, 3)])
        return self._chat(rng, [(rng.choice(phrases.PAGE).replace("{t}", page.title), answer)])

    def _prose(self, rng: Random) -> str:
        page = rng.choice(self._pages)
        first = rng.randrange(len(page.paragraphs))
        head = f"{page.title}\n\n" if first == 0 else ""
        return head + "\n\n".join(page.paragraphs[first : first + rng.randint(2, 12)]) + "\n"
