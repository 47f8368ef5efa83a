"""Runs one process of a fleet: starts it again when it dies, and keeps its output in a file."""

import asyncio
import json
import signal
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadgen.fleet.lifeline import bound
from shared.errors import SlacklineError

# the pause before a start; it doubles with every life shorter than SHORT_LIFE_S
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
SHORT_LIFE_S = 10.0
TAIL_LINES = 12

Say = Callable[[str], None]


class ChildError(SlacklineError):
    """A process ended at its first start; the message ends with the last lines of its log."""


class Child:
    """One process. `keep` runs it. Signals may be sent to it at any time; it has a session of its
    own, so that Ctrl-C does not reach it.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, say: Say
    ) -> None:
        self.name = name
        self.log = log
        self.environment = dict(environment)  # of the next start
        self.patient = False  # False: its first death is final
        self.starts = 0
        self._command = list(command)
        # the log before this offset is of an earlier fleet
        self._log_from = log.stat().st_size if log.exists() else 0
        self._fresh_from = self._log_from
        self._say = say
        self._process: Process | None = None
        self._wanted = True
        # `_wanted` changed, or the pause before the next start is to be cut short
        self._wake = asyncio.Event()
        self._stopping = False  # this life was asked to end: its end is no failure
        self._killed = False  # this life was killed by us: it does not count as short

    @property
    def pid(self) -> int | None:
        """The process id; None while it is not running."""
        return None if self._process is None else self._process.pid

    async def keep(self) -> None:
        """Start the process, and again when it ends, until cancelled. Once `patient`, this never
        gives up: a full disk or a lost broker comes back. ChildError: it died before that.
        """
        loop = asyncio.get_running_loop()
        short_lives = 0
        while True:
            if not self._wanted:
                await self._woken(None)
                continue
            began_at_s = loop.time()
            code = await self._live()
            if self._stopping:
                continue
            short = not self._killed and loop.time() - began_at_s < SHORT_LIFE_S
            short_lives = short_lives + 1 if short else 0
            if not self.patient:
                raise ChildError(
                    f"{self.name} {_ending(code)} at its start: {self.reason()}\n"
                    f"  (its log: {self.log})"
                )
            backoff_s = min(FIRST_BACKOFF_S * 2**short_lives, LONGEST_BACKOFF_S)
            self._say(f"{self.name} {_ending(code)}; it is started again in {backoff_s:g} s")
            await self._woken(backoff_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Nothing happens if it is not running."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill it with SIGKILL, as in a crash. It is started again."""
        self._killed = True
        self.send(signal.SIGKILL)

    async def stop(self, within_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it has not ended `within_s`. It stays down until `start`."""
        self._wanted, self._stopping = False, True
        self._wake.set()
        self.send(signal.SIGTERM)
        if not await self._ended(within_s):
            self._say(f"{self.name} did not end within {within_s:g} s and is killed")
            self.send(signal.SIGKILL)
            await self._ended(within_s)

    def start(self) -> None:
        """Start it after a `stop`, or at once rather than at the end of a pause."""
        self._wanted = True
        self._wake.set()

    async def restart(self, within_s: float = 15.0) -> None:
        """Stop it in order, and start it."""
        await self.stop(within_s)
        self.start()

    def abandon(self) -> None:
        """Kill the process with SIGKILL. It stays down."""
        self._wanted, self._stopping = False, True
        self.send(signal.SIGKILL)

    def output(self) -> str:
        """All that the process has logged, over all its lives."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(self._log_from)
            return log.read().decode(errors="replace")

    def address(self) -> str | None:
        """The address that a gateway logs when it is ready; None before."""
        for line in self.output().splitlines():
            if '"service.ready"' in line:
                address: str = json.loads(line)["address"]
                return address
        return None

    def fresh_lines(self) -> list[str]:
        """The whole lines logged since the last call, or since the process's first start."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(self._fresh_from)
            whole, end, _ = log.read().rpartition(b"\n")
        self._fresh_from += len(whole) + len(end)
        return whole.decode(errors="replace").splitlines()

    def reason(self) -> str:
        """The line of the log that says why the process ended: the last line that is not ours, such
        as a traceback's last or the words of an exit; else the last error; else the last lines.
        """
        errors = list[str]()
        for line in reversed(self.output().splitlines()):
            try:
                told = json.loads(line)
            except ValueError:
                if line.strip():
                    return line.strip()[:400]
            else:
                if isinstance(told, dict) and told.get("level") in ("error", "critical"):
                    errors.append(line[:400])
        return errors[0] if errors else f"\n{self.tail()}"

    def tail(self) -> str:
        """The last lines of the process's log."""
        return (
            "\n".join(f"  {line[:400]}" for line in self.output().splitlines()[-TAIL_LINES:])
            or "  (nothing)"
        )

    async def _live(self) -> int:
        """Run the process from a start to an end. Returns the exit status."""
        self._stopping = self._killed = False
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *bound(self._command),
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment, start_new_session=True,
            )  # fmt: skip
        self.starts += 1
        if self._stopping:
            self.send(signal.SIGTERM)  # while it started
        try:
            return await self._process.wait()
        finally:
            if self._process.returncode is None:
                self.send(signal.SIGKILL)
            self._process = None

    async def _ended(self, within_s: float) -> bool:
        process = self._process
        if process is None:
            return True
        try:
            async with asyncio.timeout(within_s):
                await process.wait()
        except TimeoutError:
            return False
        return True

    async def _woken(self, within_s: float | None) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._wake.wait()
        except TimeoutError:
            pass


def _ending(code: int) -> str:
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    )
