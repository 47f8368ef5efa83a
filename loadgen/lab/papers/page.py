"""The text of a page of docs/, from the runs that the cache holds."""

import re
from collections.abc import Container, Mapping, Sequence

from loadgen.lab.papers.cache import Cache
from loadgen.lab.papers.experiment import Run
from loadgen.lab.papers.section import MISSING, Page, Results, Section
from loadgen.markdown import wrap

MANY_SEEDS = 4  # more in a row are named by the first and the last


def render_page(
    page: Page,
    cache: Cache,
    hours: Mapping[str, float],
    names: Container[str],
    present: str = "",
) -> str:
    """The page with the sections of these names written anew; the others stay as they are in the
    `present` page, where they are in it. So does one that would lose figures, since its runs are of
    a policy as it was. `hours` has the length of the runs of each section that does not use its
    own.
    """
    kept = _sections(present)

    def written(section: Section) -> str:
        before = kept.get(section.title)
        if before is not None and section.name not in names:
            return before
        text = render_section(section, cache, hours.get(section.name, section.hours))
        if before is not None and before.count(MISSING) < text.count(MISSING):
            return before
        return text

    chapters = (
        _joined(f"## {chapter.title}", chapter.setup, *map(written, chapter.sections))
        for chapter in page.chapters
        if chapter.sections
    )
    return wrap(_joined(page.introduction, *chapters)) + "\n"


def _sections(page: str) -> dict[str, str]:
    """The sections of a page by their titles."""
    parts = re.split(r"^(?=###? )", page, flags=re.MULTILINE)
    sections = (part.removeprefix("### ") for part in parts if part.startswith("### "))
    return {part.partition("\n")[0]: f"### {part}" for part in sections}


def render_section(section: Section, cache: Cache, hours: float) -> str:
    """The section without line breaks in its paragraphs: `wrap` adds them."""
    results = Results(cache.get)
    tables = section.render(results, 3600 * hours)
    command = f"`python -m loadgen.lab.papers --only {section.name} --hours {hours:g}`"
    return _joined(
        f"### {section.title}", section.paper, command, _facts(results), tables, section.discussion
    )


def _facts(results: Results) -> str:
    """The profile, seed, length, definition and date of the runs of one section."""
    days = sorted({result.on for result in results.used})
    when = "not run yet" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    runs = [job if isinstance(job, Run) else job.run for job in results.requested]
    profiles = _code([run.profile for run in runs])
    definitions = _code([run.definition for run in runs])
    lengths_h = sorted({run.duration_s / 3600 for run in runs})
    arrivals = " to ".join(f"{h:.2g}" for h in dict.fromkeys((lengths_h[0], lengths_h[-1])))
    seeds = _shown(sorted({run.seed for run in runs}))
    return (
        f"Profile {profiles}, seed {seeds}, {arrivals} h of arrivals a run, "
        f"definition {definitions}; {when}."
    )


def _code(names: Sequence[str]) -> str:
    """Each name once, as code."""
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _joined(*blocks: str) -> str:
    return "\n\n".join(block.strip() for block in blocks if block.strip())


def _shown(seeds: Sequence[int]) -> str:
    """The seeds, in increasing order; many in a row as "FIRST to LAST"."""
    rows: list[list[int]] = []
    for seed in seeds:
        if rows and seed == rows[-1][-1] + 1:
            rows[-1].append(seed)
        else:
            rows.append([seed])
    return ", ".join(
        f"{row[0]} to {row[-1]}" if len(row) > MANY_SEEDS else ", ".join(map(str, row))
        for row in rows
    )
