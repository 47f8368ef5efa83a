"""`slackline chat`: a conversation in the terminal, each answer with its TTFT, its pace and the
tier it was served as.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from loadgen.cli import default_url
from loadgen.load.stream import Streamed, printable, stream
from loadgen.load.tally import GOOD_ENDS
from shared.client.client import Patience, new_request_id
from shared.clock import Clock
from shared.errors import BusError, ConfigError, NoResponders, PeerError, SlacklineError
from shared.schemas import GenerateRequest, Sampling
from shared.subjects import ID_PATTERN
from shared.vocabulary import FinishReason

PATIENCE = Patience(submit_s=3.0)
HELP = """/tier NAME   the latency wanted from now on
/system TEXT what the model is told first (empty: nothing)
/again       the last answer once more, otherwise
/reset       forget the conversation
/quit        or Ctrl-D; Ctrl-C stops an answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tier", default="chat", help="the latency wanted, by name (default: chat)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="of each answer (default: 256)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default: 0.7)"
    )
    parser.add_argument(
        "--seed", type=int, metavar="K", help="the same seed and words give the same conversation"
    )
    parser.add_argument(
        "--url",
        default=default_url(),
        help="the NATS server (default: SLACKLINE_URL, else nats://127.0.0.1:4222)",
    )


def run(args: argparse.Namespace) -> int:
    """Lines come from the terminal, or from a pipe. The answers go to standard output, words about
    them to standard error.
    """
    if not ID_PATTERN.fullmatch(args.tier):
        raise ConfigError("--tier must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -")
    try:
        sampling = msgspec.convert(
            {"max_tokens": args.max_tokens, "temperature": args.temperature, "seed": args.seed},
            Sampling,
        )
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    with suppress(ImportError):
        import readline  # noqa: F401  editing and history for input()
    chat = Chat(args.url, args.tier, args.system, sampling)
    terminal = sys.stdin.isatty()
    if terminal:
        _note("Type to talk, /help for more, Ctrl-D to leave.")
    failed = False
    while (line := _line(terminal)) is not None:
        word, _, rest = line.partition(" ")
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                break
            case "/help":
                _note(HELP)
            case "/tier" if ID_PATTERN.fullmatch(rest):
                chat.tier = rest
            case "/system":
                chat.system = rest
            case "/reset":
                chat.turns.clear()
            case "/again" if chat.turns:
                failed = not chat.again()
            case _ if word.startswith("/"):
                _note(f"{word}: not that way; /help says what there is")
            case _:
                failed = not chat.say(line)
    return 1 if failed and not terminal else 0


class Chat:
    """What was said. Each answer has a connection of its own, so that nothing has to be kept alive
    while a person thinks.
    """

    def __init__(self, url: str, tier: str, system: str, sampling: Sampling) -> None:
        self.tier = tier
        self.system = system
        self.turns: list[tuple[str, str]] = []  # what was asked, what was answered
        self._url = url
        self._sampling = sampling
        self._answers = 0
        self._session = new_request_id()

    def say(self, text: str) -> bool:
        """Ask, show the answer, remember both. False if there was no good end; then nothing is
        remembered.
        """
        try:
            answer = asyncio.run(self._ask(text, _show))
        except KeyboardInterrupt:
            _note("\nstopped")
            return False
        except SlacklineError as error:
            _note(str(error))
            return False
        print()
        _note(f"[{self.tier}: {answer.in_words}]")
        good = answer.verdict.finish_reason in GOOD_ENDS
        if good:
            self.turns.append((text, answer.text))
        if (
            answer.verdict.finish_reason is FinishReason.LENGTH
            and answer.verdict.output_tokens < self._sampling.max_tokens
        ):
            self._forget_oldest()
        return good

    def again(self) -> bool:
        """The last question once more; what was answered is kept unless there is another answer."""
        before = self.turns.pop()
        good = self.say(before[0])
        if not good:
            self.turns.append(before)
        return good

    def _forget_oldest(self) -> None:
        del self.turns[:1]
        _note("(the conversation fills the model's context: its oldest turn is forgotten)")

    async def _ask(self, text: str, show: Callable[[str], None]) -> Streamed:
        from loadgen.load.connection import connected

        self._answers += 1
        seed = self._sampling.seed
        sampling = (
            self._sampling
            if seed is None
            else msgspec.structs.replace(self._sampling, seed=seed + self._answers)
        )
        async with connected(self._url, "slackline-chat", Clock(), PATIENCE) as client:
            while True:
                request = GenerateRequest(
                    request_id=new_request_id(),
                    messages=self._messages(text),
                    sampling=sampling,
                    session=self._session,
                )
                began_s = time.monotonic()
                try:
                    return await stream(await client.submit(request, self.tier), began_s, show)
                except NoResponders as error:
                    raise BusError(
                        f"{self._url} answers, but no admission service is there: start a fleet with `slackline up`"
                    ) from error
                except PeerError as error:
                    if error.code != "context_length_exceeded" or not self.turns:
                        raise
                    self._forget_oldest()

    def _messages(self, text: str) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        said = [
            {"role": role, "content": content}
            for turn in self.turns
            for role, content in zip(("user", "assistant"), turn, strict=True)
        ]
        return [*system, *said, {"role": "user", "content": text}]


def _line(terminal: bool) -> str | None:
    """The next line, without its spaces; None at the end."""
    try:
        return input("\n> " if terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _show(text: str) -> None:
    print(printable(text), end="", flush=True)


def _note(text: str) -> None:
    """Apart from what the model says."""
    dim, plain = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    print(f"{dim}{text}{plain}", file=sys.stderr, flush=True)
