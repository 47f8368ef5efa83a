"""`slackline record`: writes the requests of a running fleet to a trace, until Ctrl-C."""

import argparse
import asyncio
import csv
import gzip
import math
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

from rich.console import Console

from loadgen.access import access_of, add_access_arguments
from loadgen.cli.options.option import add_options
from loadgen.load.connection import connecting
from loadgen.load.trace import NORMALISED
from shared import subjects
from shared.bus.api import Call
from shared.bus.users import OPERATOR
from shared.clock import Clock
from shared.errors import ConfigError
from shared.process.fleet_time import FleetTime
from shared.schemas import Digest, Ended, PoolDigest
from shared.vocabulary import ReplicaId

COLUMNS = (*NORMALISED, "tier", "tenant", "model")
LONGEST_S = 1e7  # of one recording, nearly four months
TOLD_S = 5.0  # between two lines of progress
WAIT_S = 60.0
LOOK_S = 0.5  # between two looks whether requests still run
QUIET_S = 2.0  # if none is held for so long, all have ended: one on its way is held sooner


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        f"""
        --out FILE (required): the trace, as .csv or .csv.gz; a file that is there is replaced
        --duration S (float): record the requests that come within S seconds
            (default: until Ctrl-C)
        --wait S = {WAIT_S}: with --duration: wait at most S seconds more for the answers that still
            run
        """,
    )
    add_access_arguments(parser, "the operator")


def run(args: argparse.Namespace) -> int:
    for name, value_s in (("--duration", args.duration), ("--wait", args.wait)):
        if value_s is not None and not 0 <= value_s <= LONGEST_S:
            raise ConfigError(f"{name} must be 0 to {LONGEST_S:.0f} seconds")
    if not args.out.name.endswith((".csv", ".csv.gz")):
        raise ConfigError(f"--out {args.out}: expected a file that ends in .csv or .csv.gz")
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 120, highlight=False)
    recording = Recording(LONGEST_S if args.duration is None else args.duration)
    with suppress(KeyboardInterrupt):  # the way to end it
        asyncio.run(_record(args, recording, console))
    console.print(f"{args.out}: {recording.in_words}", soft_wrap=True)
    return 0


class Recording:
    """The requests that arrive after the recording began, as rows of a trace once they ended."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s, self._began_unix_s = duration_s, math.inf
        self._rows: list[tuple[object, ...]] = []  # not yet written
        self._written = self._without = 0

    @contextmanager
    def begun(self, path: Path, now_unix_s: float) -> Iterator[Callable[[], None]]:
        """Yields a function that writes new rows to this file, and may raise ConfigError."""

        def write() -> None:
            rows.writerows(self._rows)
            file.flush()
            self._written += len(self._rows)
            self._rows.clear()

        self._began_unix_s = now_unix_s
        try:
            with _opened(path, "wt") as file:
                rows = csv.writer(file)
                rows.writerow(COLUMNS)
                write()
                try:
                    yield write
                finally:
                    write()
            if path.is_file():
                _sort(path)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {path}: {error.strerror}") from error

    def hear(self, ended: Ended) -> None:
        verdict, arrival_s = ended.verdict, ended.arrived_unix_s - self._began_unix_s
        if ended.key is None or verdict is None:  # refused at the door just now
            self._without += ended.requests
        elif not 0 <= arrival_s <= self._duration_s:
            return
        elif not verdict.prompt_tokens or not verdict.output_tokens:
            self._without += 1
        else:
            tenant, _, _ = ended.key.partition(".")
            lengths = verdict.prompt_tokens, verdict.output_tokens
            self._rows.append((f"{arrival_s:.6f}", *lengths, ended.tier, tenant, ended.model))

    @property
    def in_words(self) -> str:
        out = f"{self._written:,} requests"
        if self._without:
            out += f"; {self._without:,} more had no answer, and are not in it"
        return out


def _opened(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, mode, newline="", encoding="utf-8")
    return path.open(mode, newline="", encoding="utf-8")


def _sort(path: Path) -> None:
    """Put the rows, which were written as requests ended, into the order of arrival."""
    with _opened(path, "rt") as file:
        head, *rows = csv.reader(file)
    sorted_path = path.with_name(f".sorted-{path.name}")
    with _opened(sorted_path, "wt") as file:
        csv.writer(file).writerows([head, *sorted(rows, key=lambda row: float(row[0]))])
    sorted_path.replace(path)


class Busy:
    """The requests that a fleet holds, as its replicas and its best-effort pool tell."""

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, int] = {}
        self._pool = 0
        self.last_unix_s = -math.inf  # when some request was last held

    def hear_digest(self, digest: Digest, now_unix_s: float) -> None:
        self._replicas[digest.replica] = digest.waiting + digest.running + digest.best_effort
        self._note(now_unix_s)

    def hear_pool(self, pool: PoolDigest, now_unix_s: float) -> None:
        self._pool = sum(lane.requests for lane in pool.lanes)
        self._note(now_unix_s)

    def _note(self, now_unix_s: float) -> None:
        if self._pool or any(self._replicas.values()):
            self.last_unix_s = now_unix_s


async def _record(args: argparse.Namespace, recording: Recording, console: Console) -> None:
    """Record until the time is over. Raises BusError without a server, ConfigError for the file."""
    clock, busy = Clock(), Busy()

    def on_ended(ended: Ended, _: Call) -> None:
        recording.hear(ended)

    def on_digest(digest: Digest, _: Call) -> None:
        busy.hear_digest(digest, clock.unix_s())

    def on_pool(pool: PoolDigest, _: Call) -> None:
        busy.hear_pool(pool, clock.unix_s())

    async with connecting(access_of(args), "slackline-record", OPERATOR) as bus:
        await FleetTime(bus, clock, "", "record").begin()  # arrivals are told by it
        await bus.subscribe(subjects.ENDED, Ended, on_ended)
        await bus.subscribe(subjects.DIGESTS, Digest, on_digest)
        await bus.subscribe(subjects.POOL, PoolDigest, on_pool)

        async def within(left_s: float, step_s: float) -> AsyncIterator[None]:
            """Yields after each step until the time is over. Raises the failure of the bus."""
            while left_s > 0:
                span_s = min(step_s, left_s)
                await asyncio.wait([bus.failed], timeout=span_s)
                if bus.failed.done():
                    bus.failed.result()
                left_s -= span_s
                yield

        with recording.begun(args.out, clock.unix_s()) as write:
            async for _ in within(LONGEST_S if args.duration is None else args.duration, TOLD_S):
                write()
                console.print(recording.in_words)
            if args.duration is None:
                return
            over_unix_s = clock.unix_s()
            console.print(f"waiting until no request runs, at most {args.wait:g} s")
            async for _ in within(args.wait, LOOK_S):
                if clock.unix_s() - max(busy.last_unix_s, over_unix_s) > QUIET_S:
                    return
