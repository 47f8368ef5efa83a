"""Running prose: the paragraphs of SQLite's documentation (Debian package sqlite3-doc)."""

import html
import re
from dataclasses import dataclass
from pathlib import Path

SKIPPED = re.compile(
    r"<(script|style|svg|pre|table|head|button)\b.*?</\1>", re.DOTALL | re.IGNORECASE
)
BLOCK = re.compile(
    r"<(?:p|li|dd|blockquote|h[1-6]|div|dt|ul|ol|dl|hr"
    r"|/p|/li|/dd|/div|/h[1-6]|/dt|/ul|/ol|/dl)\b[^>]*>",
    re.IGNORECASE,
)
TAG = re.compile(r"<[^>]*>|<[^>]*$")
TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL | re.IGNORECASE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# The least and the most characters of a paragraph: shorter texts are labels, longer ones are lists
# that lost their markup.
CHARACTERS = (90, 900)
# The least share of letters, spaces and common punctuation: texts below it are code or numbers.
PLAIN_SHARE = 0.93
ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|etc|vs|Dr|cf)\.$")
# Pages of changes, figures and reference tables are not prose.
UNWANTED = re.compile(
    r"changes|releaselog|chronology|fileio|speed|sitemap|syntax|releases/|c3ref/|session/|cves|hp1"
    r"|toc_db|doc_|vdbe\.html|opcode"
)


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    paragraphs: tuple[str, ...]


def read_pages(folder: Path) -> list[Page]:
    """The pages that contain prose, in the order of their paths."""
    out, seen = [], set[str]()
    for path in sorted(folder.rglob("*.html")):
        if UNWANTED.search(str(path.relative_to(folder))):
            continue
        page = clean(path.read_text(errors="ignore"))
        kept = tuple(p for p in page.paragraphs if p not in seen)
        seen.update(kept)
        if len(kept) >= 2:
            out.append(Page(page.title, kept))
    return out


def clean(source: str) -> Page:
    """The title of a page and its paragraphs of prose.

    They are ASCII, have one space between words, and consist of whole sentences.
    """
    match = TITLE.search(source)
    title = _plain(match[1]) if match else ""
    body = SKIPPED.sub("\n\n", re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL))
    paragraphs = (_plain(block) for block in BLOCK.split(body))
    return Page(title, tuple(p for p in paragraphs if is_prose(p)))


def is_prose(text: str) -> bool:
    if (
        not CHARACTERS[0] <= len(text) <= CHARACTERS[1]
        or not text[0].isupper()
        or text[-1] not in ".!?"
    ):
        return False
    plain = sum(c.isalpha() or c in " ,.;'\"-()" for c in text)
    return plain >= PLAIN_SHARE * len(text)


def sentences(paragraph: str) -> list[str]:
    out: list[str] = []
    for piece in SENTENCE_END.split(paragraph):
        if out and ABBREVIATION.search(out[-1]):
            out[-1] += " " + piece
        else:
            out.append(piece)
    return out


def _plain(source: str) -> str:
    text = html.unescape(TAG.sub("", source))
    text = text.translate(
        {
            0x2018: "'",
            0x2019: "'",
            0x201C: '"',
            0x201D: '"',
            0x2013: "-",
            0x2014: "-",
            0x2011: "-",
            0xA0: " ",
        }
    )
    text = re.sub(r"\[([^\[\]]{1,40})\]", r"\1", text)
    return re.sub(r"\s+", " ", text.encode("ascii", "ignore").decode()).strip()
