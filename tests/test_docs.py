"""Tests of what a machine can check of the pages: every link, path, module, command and option that
they name exists, and their lines are short.
"""

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from loadgen.cli.main import COMMANDS
from shared.bus.permissions import TABLE
from shared.process.configuration import SECTIONS, WATCHED

ROOT = Path(__file__).parent.parent
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
FOLDERS = ("shared", "services", "loadgen", "infra", "tests", "docs")
WIDTH = 100
# The pages about how good it is: they have figures of machines and dates. All others say what is.
LABORATORY = {"docs/laboratory.md"}
WORDS = 45_200

FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"`([^`\n]+)`")
# A file of ours: any path to a Python file, and any path below one of our folders.
PYTHON_FILE = re.compile(r"(?<![\w/.<>*-])((?:[\w.-]+/)*\w[\w.-]*\.py)\b")
OUR_PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)(?![\w*{{<])")
MODULE = re.compile(r"python -m ([a-z_]+(?:\.[a-z_]+)*)")
DOTTED = re.compile(r"(?<![\w./-])((?:shared|services|loadgen)(?:\.\w+)+)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
PAGE = re.compile(r"\bdocs/[a-z-]+\.md")
SETTING = re.compile(rf"SLACKLINE_({'|'.join(SECTIONS).upper()})_([A-Z_]+[A-Z])")
STRANGERS = {"--scale"}  # options of docker compose
READERS = {"llf.py"}  # files that a reader makes
TARGET = re.compile(r"`make ([a-z-]+)")


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=title)


def prose(text: str) -> str:
    """The page without its fenced blocks, each replaced by as many empty lines."""
    return FENCE.sub(lambda block: "\n" * block.group().count("\n"), text)


@cache
def slugs(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def files() -> list[str]:
    """The files of our folders, each with a slash before its path."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return [f"/{path.relative_to(ROOT)}" for path in paths]


def is_file_of_ours(name: str) -> bool:
    """Tells whether `name` is a path from the root, or the end of exactly one file's path:
    `lead.py`, `perf/shape.py`. Every package has an `__init__.py`.
    """
    if name == "__init__.py" or (ROOT / name).exists():
        return True
    return sum(path.endswith(f"/{name}") for path in files()) == 1


@cache
def options(command: str) -> set[str]:
    parser = argparse.ArgumentParser()
    import_module(COMMANDS[command][0]).add_arguments(parser)
    return {"--help", *_options_of(parser)}


def _options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _options_of(sub)


@cache
def declared_options() -> set[str]:
    """Every option that a program of ours declares, alone or in a line of several."""
    code = [path for room in ("services", "loadgen") for path in (ROOT / room).rglob("*.py")]
    declared = re.compile(r'(?:^ *|")(--[a-z-]+)[ ":]', re.MULTILINE)
    return {"--help"}.union(*(declared.findall(path.read_text()) for path in code))


@cache
def fields(section: str) -> tuple[str, ...]:
    """The settings of a service, as its configuration declares them."""
    config = import_module(f"services.{section}.config")
    own: tuple[str, ...] = getattr(config, f"{section.capitalize()}Config").__struct_fields__
    return own if section == "gateway" else own + WATCHED


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Every `slackline COMMAND ...` of a page: the command (or commands, as `simulate|bound`) and
    the options after it.
    """
    joined = re.sub(r" *\\\n *", " ", text)
    spans = [line for block in FENCE.findall(joined) for line in block.splitlines()]
    spans += INLINE.findall(re.sub(r"(?<!\n)\n(?!\n)", " ", prose(joined)))
    for span in spans:
        call = re.search(r"(?:^|[/ ])slackline ([a-z|]+)(?=\s|$)(.*)", span)
        if call:
            arguments = re.split(r"\s#\s|\s\| ", call.group(2))[0]
            for command in call.group(1).split("|"):
                yield command, OPTION.findall(arguments)


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in slugs(target)):
            broken.append(link)
    assert broken == []


@every_page
def test_every_path_exists(page: Path) -> None:
    text = page.read_text()
    named = {*PYTHON_FILE.findall(text), *OUR_PATH.findall(text)} - READERS
    assert sorted(name for name in named if not is_file_of_ours(name)) == []


@every_page
def test_every_module_exists(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in MODULE.findall(text) if not importlib.util.find_spec(name)]
    missing += [name for name in DOTTED.findall(text) if not _is_defined(name)]
    assert missing == []


def _is_defined(dotted: str) -> bool:
    """Tells whether it is a module, or a name in one."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    source = path.parent.with_suffix(".py")
    return source.is_file() and any(
        getattr(node, "name", None) == path.name for node in ast.parse(source.read_text()).body
    )


@every_page
def test_every_command_and_option_exists(page: Path) -> None:
    wrong = []
    for command, used in commands(page.read_text()):
        if command not in COMMANDS:
            wrong.append(command)
        else:
            wrong += [f"{command} {option}" for option in used if option not in options(command)]
    assert wrong == []


@every_page
def test_every_option_named_alone_exists_somewhere(page: Path) -> None:
    """`--wait S` in a table: an option of one of our commands or programs, or of a stranger."""
    spans = [span for span in INLINE.findall(prose(page.read_text())) if span.startswith("--")]
    named = {option for span in spans for option in OPTION.findall(span)}
    assert named - declared_options() - STRANGERS == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docker-compose.yml"], ids=title)
def test_every_setting_of_a_service_exists(page: Path) -> None:
    named = set(SETTING.findall(page.read_text()))
    assert {f"{s}_{f}" for s, f in named if f.lower() not in fields(s.lower())} == set()


def test_every_page_that_the_code_names_exists() -> None:
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = {(path, page) for path in code for page in PAGE.findall(path.read_text())}
    assert sorted(title(path) for path, page in named if not (ROOT / page).exists()) == []


@every_page
def test_every_make_target_exists(page: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(TARGET.findall(page.read_text())) <= set(targets)


@every_page
def test_every_curl_for_an_answer_says_how_long_it_may_be(page: Path) -> None:
    """Without `max_tokens` a simulated engine talks until its context is full."""
    for block in re.findall(r"```.*?```", page.read_text(), re.DOTALL):
        for command in re.split(r"\n(?=[^\n]*\bcurl )", block):
            if re.search(r"v1/(chat/)?completions.* -d ", command, re.DOTALL):
                assert "max_tokens" in command, command


@every_page
def test_lines_are_short(page: Path) -> None:
    """At most 100 columns. Tables, code, pictures and lines with a URL may be longer."""
    lines = enumerate(prose(page.read_text()).splitlines(), start=1)
    longer = [(n, line) for n, line in lines if len(line) > WIDTH]
    assert [n for n, line in longer if not line.startswith(("|", "![")) and "://" not in line] == []


def test_pages_are_few_words_together() -> None:
    """The cards of the models count, too."""
    cards = (ROOT / "shared" / "models").glob("*/README.md")
    words = {title(page): len(page.read_text().split()) for page in (*PAGES, *cards)}
    assert sum(words.values()) <= WORDS, words


@every_page
def test_no_date_stands_outside_the_laboratory(page: Path) -> None:
    """A page says what is. What was is in git."""
    dated = re.findall(r"\b20\d\d-\d\d-\d\d\b", page.read_text())
    assert title(page) in LABORATORY or dated == []


def test_the_permissions_of_the_page_are_those_of_the_code() -> None:
    rows = [
        f"| `{row.subject}` | {row.what} | {', '.join(row.publish)} | {', '.join(row.subscribe)} |"
        for row in TABLE
    ]
    table = ["| subject | | may publish | may subscribe |", "|---|---|---|---|", *rows]
    page = (ROOT / "docs" / "security.md").read_text()
    assert page.partition("compares -->")[2].partition("<!-- end")[0].split("\n")[2:-2] == table
