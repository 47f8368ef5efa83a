"""The answers about a word: sentences made from WordNet."""

import re
from random import Random

from loadgen.lab.training.wordnet import (
    HYPERNYM,
    HYPONYM,
    INSTANCE,
    NOUN,
    PARTS,
    VERB,
    Synset,
    Word,
    WordNet,
)

COUNTED = re.compile(
    r"^(a|an|one|someone|any|anyone|something that"
    r"|the (act|process|part|place|time|side|quality|state|branch))\b"
)
NAMED = re.compile(r"^[A-Z]")
MANY = 5  # the most words of a list


def a(noun: str) -> str:
    """The noun with its indefinite article; a name has none."""
    if NAMED.match(noun):
        return noun
    an = re.match(
        r"[aeio]|u(?!ni|se|su|ti|r[aie]|bi)|hour|honest|heir|honou?r", noun
    ) and not re.match(r"one|eu|once", noun)
    return f"{'an' if an else 'a'} {noun}"


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(noun: str, synset: Synset) -> bool:
    """True if the noun takes an article, as most glosses show."""
    return not NAMED.match(noun) and COUNTED.match(synset.gloss) is not None


def named(word: Word, synset: Synset) -> str:
    """The word as the subject of a sentence: with `to` or an article where it takes one."""
    if word.pos == VERB:
        return f"to {word.lemma}"
    return a(word.lemma) if word.pos == NOUN and counted(word.lemma, synset) else word.lemma


def define(word: Word, synset: Synset) -> str:
    gloss = synset.gloss.removeprefix("to ") if word.pos == VERB else synset.gloss
    field = f"in {synset.field}, " if synset.field else ""
    subject = named(word, synset)
    if word.pos == VERB:
        return sentence(f"{field}{subject} is to {gloss}")
    if word.pos == NOUN:
        link = "is" if subject != word.lemma or NAMED.match(subject) else "means"
        return sentence(f"{field}{subject} {link} {gloss}")
    return sentence(f"{field}{subject} means {gloss}")


def uses(word: Word, synset: Synset) -> list[str]:
    """The examples that contain a form of the word, as sentences.

    WordNet's examples are for all words of a synset.
    """
    stem = word.lemma.lower()[: max(3, len(word.lemma) - 2)]
    return [
        sentence(e.replace("`", "'"))
        for e in synset.examples
        if len(e.split()) >= 3 and re.search(rf"\b{re.escape(stem)}", e.lower())
    ]


def synonyms(word: Word, synset: Synset) -> list[str]:
    return [w for w in synset.words if w.lower() != word.lemma.lower()][:MANY]


class Speaker:
    def __init__(self, wordnet: WordNet) -> None:
        self.net = wordnet

    def first(self, word: Word) -> Synset:
        return self.net.synsets[word.senses[0]]

    def kind(self, word: Word, synset: Synset) -> str | None:
        above = self.net.targets(synset, HYPERNYM + INSTANCE)
        if not above:
            return None
        if word.pos == VERB:
            return sentence(f"{named(word, synset)} is a way to {above[0].words[0]}")
        upper = above[0].words[0]
        link, kind = ("is", a(upper)) if NAMED.match(word.lemma) else ("is a kind of", upper)
        return sentence(f"{named(word, synset)} {link} {kind}")

    def kinds(self, word: Word, synset: Synset) -> str | None:
        below = [s.words[0] for s in self.net.targets(synset, HYPONYM)][:MANY]
        if len(below) < 2:
            return None
        if word.pos == VERB:
            return sentence(f"some ways to {word.lemma} are to {listed(below)}")
        return sentence(f"some kinds of {word.lemma} are {listed(below)}")

    def parts(self, word: Word, synset: Synset) -> str | None:
        parts = [s.words[0] for s in self.net.targets(synset, PARTS)][:MANY]
        return (
            sentence(f"{named(word, synset)} has these parts: {listed(parts)}")
            if parts and word.pos == NOUN
            else None
        )

    def another(self, word: Word, synset: Synset) -> str | None:
        others = synonyms(word, synset)
        return sentence(f"another word for {word.lemma} is {others[0]}") if others else None

    def opposite(self, word: Word, synset: Synset) -> str | None:
        others = self.net.opposites(synset, word.lemma)
        return sentence(f"the opposite of {word.lemma} is {others[0]}") if others else None

    def use(self, word: Word, synset: Synset) -> str | None:
        examples = uses(word, synset)
        return examples[0] if examples else None

    def chain(self, synset: Synset, depth: int) -> str | None:
        """Sentences that name the kind of a thing and define it, and so on up to `depth` kinds."""
        chained: list[str] = []
        for _ in range(depth):
            above = self.net.targets(synset, HYPERNYM)
            if not above or synset.pos != NOUN:
                break
            upper, noun = above[0], synset.words[0]
            subject = a(noun) if counted(noun, synset) else noun
            chained.append(sentence(f"{subject} is a kind of {upper.words[0]}"))
            chained.append(define(Word(upper.words[0], NOUN, (), 0), upper))
            synset = upper
        return " ".join(chained) or None

    def others(self, word: Word, most: int) -> str | None:
        """The further senses of the word."""
        glosses = [self.net.synsets[key].gloss for key in word.senses[1 : 1 + most]]
        if not glosses:
            return None
        verb = "to " if word.pos == VERB else ""
        leads = ("it can also mean", *["or it can mean"] * (len(glosses) - 1))
        senses = [
            sentence(f"{lead} {verb}{gloss.removeprefix('to ')}")
            for lead, gloss in zip(leads, glosses, strict=True)
        ]
        return " ".join(senses)

    def about(self, word: Word, rng: Random, length: int) -> str:
        """Several sentences: the definition, and up to `length` further facts."""
        synset = self.first(word)
        further = [
            self.chain(synset, 1 + (length > 3)),
            self.others(word, 1 + length // 2),
            self.parts(word, synset),
            self.kinds(word, synset),
            self.another(word, synset),
            self.opposite(word, synset),
        ]
        facts = [text for text in further if text]
        chosen = sorted(rng.sample(range(len(facts)), min(length, len(facts))))
        examples = uses(word, synset)
        example = [f"For example: {' '.join(examples[:2])}"] if examples else []
        return " ".join([define(word, synset), *(facts[n] for n in chosen), *example])

    def verse(self, word: Word) -> str:
        """A verse of three short lines."""
        synset = self.first(word)
        above = self.net.targets(synset, HYPERNYM + INSTANCE)
        middle = (
            (
                f"a kind of {above[0].words[0]}"
                if word.pos == NOUN
                else f"a way to {above[0].words[0]}"
            )
            if above
            else f"so {word.lemma}"
        )
        return f"{sentence(word.lemma)[:-1]},\n{middle},\n{sentence(synset.gloss)}"
