"""Draws what is met together and apart: a column of bars for each load, a panel for each policy."""

from collections.abc import Sequence
from pathlib import Path

from loadgen.lab.apart.ratios import LINKS, Cells
from loadgen.lab.apart.runs import Job
from loadgen.trials.plots import COLOURS, new_figure, write


def draw(asked: Sequence[Sequence[Job]], found: Sequence[Cells], folder: Path) -> Path:
    policies = list(dict.fromkeys(job.policy for job, *_ in asked))
    jobs = [job for job, *_ in asked]
    figure, panels = new_figure(
        len(policies), 1, "Prefill and decode together and apart", "SLOs met, %; simulated"
    )
    figure.set_size_inches(10.0, 2.2 * len(policies))
    links = sorted(LINKS)
    for axes, policy in zip(panels, policies, strict=True):
        of = [(job, cell) for job, cell in zip(jobs, found, strict=True) if job.policy == policy]
        bars = {"together": [cell.together for _, cell in of]}
        bars |= {f"{link:g} Gbit/s": [cell.apart[link] for _, cell in of] for link in links}
        for link in links[:2]:
            name = f"by request, {link:g} Gbit/s"
            bars[name] = [cell.by_request[link] for _, cell in of]
        width = 0.8 / len(bars)
        for n, (name, values) in enumerate(bars.items()):
            places = [place + n * width for place in range(len(of))]
            axes.bar(places, [100 * v for v in values], width, color=COLOURS[n], label=name)
        axes.set_title(policy)
        axes.set_ylim(0, 100)
        axes.set_xticks([place + (len(bars) - 1) / 2 * width for place in range(len(of))])
        axes.set_xticklabels([f"{job.load}\n{job.tiers}" for job, _ in of])
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    return write(figure, folder / "apart.svg")
