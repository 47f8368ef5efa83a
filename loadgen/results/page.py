"""A page of docs/, from what the cache holds."""

from collections.abc import Mapping, Sequence

from loadgen.results.cache import Cache
from loadgen.results.experiment import Run
from loadgen.results.section import Lab, Page, Part, Section


def written(page: Page, cache: Cache, hours: Mapping[str, float]) -> str:
    """`hours`: of those sections whose runs are not as long as they state themselves."""
    return "\n".join(
        (page.head, *(_part(part, cache, hours) for part in page.parts if part.sections))
    )


def _part(part: Part, cache: Cache, hours: Mapping[str, float]) -> str:
    sections = (
        shown(section, cache, hours.get(section.name, section.hours)) for section in part.sections
    )
    return "\n".join((f"## {part.title}\n\n{part.head}", *sections))


def shown(section: Section, cache: Cache, hours: float) -> str:
    lab = Lab(cache)
    body = section.body(lab, 3600 * hours)
    days = sorted({made.on for made in lab.used})
    when = "not run yet" if not days else days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    command = f"python -m loadgen.results --only {section.name} --hours {hours:g}"
    runs = [job if isinstance(job, Run) else job.run for job in lab.asked]
    profiles, definitions = (
        _each([run.profile for run in runs]),
        _each([run.definition for run in runs]),
    )
    each = sorted({run.duration_s / 3600 for run in runs})
    arrivals = " to ".join(f"{h:.2g}" for h in dict.fromkeys((each[0], each[-1])))
    seeds = ", ".join(f"{seed}" for seed in sorted({run.seed for run in runs}))
    facts = f"`{command}`\n\nProfile {profiles}, seed {seeds}, {arrivals} h of arrivals a run, definition {definitions}; {when}."
    return f"### {section.title}\n\n{section.paper}\n\n{facts}\n\n{body}\n\n{section.notes}"


def _each(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))
