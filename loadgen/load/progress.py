"""Shows the progress of a load: a live table in a terminal, else a line every few seconds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadgen.load.report import percent
from loadgen.load.tally import Tally
from loadgen.tables import with_columns

TERMINAL_S, PLAIN_S = 0.5, 5.0  # between two updates


class Counts:
    """The counts of one tier."""

    def __init__(self) -> None:
        self.sent = self.ended = self.met = self.relegated = 0

    @property
    def kept(self) -> str:
        return percent(self.met / self.ended) if self.ended else "-"


class Counter:
    """Counts the outcomes of a tally. An ended outcome is counted once, so that an update costs as
    much as the requests that run, not as all that ever ran.
    """

    def __init__(self, tally: Tally, planned: int, duration_s: float, label: str) -> None:
        self._tally, self._planned = tally, planned
        self._duration_s, self._label = duration_s, label
        self._seen = 0
        self._open: list[int] = []
        self.counts = {name: Counts() for name in tally.tiers.tiers}

    def update(self) -> None:
        outcomes = self._tally.outcomes
        for number in range(self._seen, len(outcomes)):
            self.counts[outcomes[number].planned.tier].sent += 1
            self._open.append(number)
        self._seen = len(outcomes)
        still = []
        for number in self._open:
            outcome = outcomes[number]
            if not outcome.ended:
                still.append(number)
                continue
            counts = self.counts[outcome.planned.tier]
            counts.ended += 1
            counts.met += outcome.met
            counts.relegated += outcome.relegated
        self._open = still

    def table(self, at_s: float) -> Table:
        at_s = min(at_s, self._duration_s)
        title = f"{self._label or 'load'}: {at_s:.0f} of {self._duration_s:.0f} s"
        heads = "tier|>sent|>running|>ended|>SLO met so far|>relegated"
        out = with_columns(Table(title=title, title_justify="left"), heads)
        for name, c in self.counts.items():
            out.add_row(
                name, str(c.sent), str(c.sent - c.ended), str(c.ended), c.kept, str(c.relegated)
            )
        return out

    def line(self, at_s: float) -> str:
        tiers = "; ".join(
            f"{name} {c.sent - c.ended} running, {c.ended} ended, met {c.kept}"
            for name, c in self.counts.items()
        )
        return f"{at_s:5.0f} s  {self._seen}/{self._planned} sent  {tiers}"


@asynccontextmanager
async def progress(
    tally: Tally, planned: int, duration_s: float, label: str, console: Console
) -> AsyncIterator[None]:
    """Show the progress on `console` while the body runs."""
    counter, loop = Counter(tally, planned, duration_s, label), asyncio.get_running_loop()
    begin_s = loop.time()

    async def show() -> None:
        if not console.is_terminal:
            while True:
                await asyncio.sleep(PLAIN_S)
                counter.update()
                console.print(counter.line(loop.time() - begin_s), soft_wrap=True)
        with Live(counter.table(0.0), console=console, auto_refresh=False, transient=True) as live:
            while True:
                await asyncio.sleep(TERMINAL_S)
                counter.update()
                live.update(counter.table(loop.time() - begin_s), refresh=True)

    task = asyncio.create_task(show(), name="load.progress")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
